"""The increments of an answer are its text, whatever the tokenizer and wherever characters are cut."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as PlainTokenizer

from llmc.artifacts.errors import PlanError
from llmc.runtime.params import RequestError
from llmc.runtime.text import Tokenizer
from tests.unit.runtime.fake_plan import byte_level, sentencepiece

TEXTS = [
    "",
    "plain words",
    "日本語のテキスト",
    "🎉👩‍👩‍👧‍👦 done",
    "naïve café",
    "a\n\n\tb",
    "ไทย",
    "\ufffd kept \ufffd",
]
BYTE_LEVEL = Tokenizer(byte_level().to_str().encode())
SENTENCEPIECE = Tokenizer(sentencepiece().to_str().encode())


def increments(tokenizer: Tokenizer, ids: list[int], context: tuple[int, ...] = (), skip: bool = True) -> list[str]:
    detokenizer = tokenizer.detokenizer(context, skip)
    return [*(detokenizer.push(token) for token in ids), detokenizer.flush()]


def spell(text: str) -> list[int]:
    """Ids of the sentencepiece-like tokenizer: pieces where there are any, else bytes."""
    ids: list[int] = []
    for char in text.replace(" ", "▁"):
        token = sentencepiece().token_to_id(char)
        ids += [token] if token is not None else [sentencepiece().token_to_id(f"<0x{b:02X}>") for b in char.encode()]
    return ids


@pytest.mark.parametrize("text", TEXTS)
def test_byte_level_text_comes_back(text: str) -> None:
    parts = increments(BYTE_LEVEL, BYTE_LEVEL.encode(text))
    assert "".join(parts) == text


@given(st.lists(st.integers(0, byte_level().get_vocab_size() - 1)), st.booleans())
def test_any_byte_level_tokens_decode_as_the_library_decodes_them(ids: list[int], skip: bool) -> None:
    # Arbitrary tokens are mostly broken UTF-8.
    assert "".join(increments(BYTE_LEVEL, ids, skip=skip)) == byte_level().decode(ids, skip_special_tokens=skip)


@given(st.text(alphabet=st.sampled_from("aet s日本é🎉語\n")))
def test_sentencepiece_text_decodes_as_the_library_decodes_it(text: str) -> None:
    ids = spell(text)
    assert "".join(increments(SENTENCEPIECE, ids)) == sentencepiece().decode(ids)


@given(st.lists(st.sampled_from([1, 2, *range(sentencepiece().token_to_id("▁"), sentencepiece().get_vocab_size())])))
def test_any_sentencepiece_pieces_decode_as_the_library_decodes_them(ids: list[int]) -> None:
    assert "".join(increments(SENTENCEPIECE, ids)) == sentencepiece().decode(ids)


def test_a_character_is_never_shown_in_part() -> None:
    for tokenizer, ids in ((BYTE_LEVEL, BYTE_LEVEL.encode("🎉é")), (SENTENCEPIECE, spell("🎉🎉🎉"))):
        parts = increments(tokenizer, ids)
        assert len(ids) > len([p for p in parts if p])
        assert not any("\ufffd" in part for part in parts)


def test_whole_characters_do_not_wait_for_the_end_of_a_run_of_bytes() -> None:
    parts = increments(SENTENCEPIECE, spell("🎉🎉"))
    assert parts[3] == "🎉"


def test_bytes_that_never_become_a_character_end_as_replacement() -> None:
    half = spell("🎉")[:2]
    assert "".join(increments(SENTENCEPIECE, [*spell("a"), *half])) == "a\ufffd\ufffd"
    half = BYTE_LEVEL.encode("🎉")[:1]
    assert increments(BYTE_LEVEL, half) == ["", "\ufffd"]


def test_endless_broken_bytes_are_shown_in_the_end() -> None:
    broken = [sentencepiece().token_to_id("<0xFF>")] * 100
    parts = increments(SENTENCEPIECE, broken)
    assert "".join(parts[:50])
    assert len("".join(parts)) == 100


def test_a_completion_keeps_its_space_and_a_chat_answer_has_none() -> None:
    the, cat = spell("e"), [sentencepiece().token_to_id("▁cat")]
    assert "".join(increments(SENTENCEPIECE, cat, tuple(the))) == " cat"
    assert "".join(increments(SENTENCEPIECE, cat)) == "cat"


def test_a_long_answer_is_decoded_in_windows() -> None:
    ids = spell("a cat sat 日本🎉 é " * 40)
    detokenizer = SENTENCEPIECE.detokenizer()
    text = "".join(detokenizer.push(token) for token in ids) + detokenizer.flush()
    assert text == sentencepiece().decode(ids)
    assert len(detokenizer._ids) < 40  # type: ignore[attr-defined]


def test_special_tokens_are_skipped_or_shown() -> None:
    ids = BYTE_LEVEL.encode("one<|im_end|>two")
    assert "".join(increments(BYTE_LEVEL, ids)) == "onetwo"
    assert "".join(increments(BYTE_LEVEL, ids, skip=False)) == "one<|im_end|>two"


def test_rows_that_pad_the_vocabulary_are_no_text() -> None:
    assert increments(BYTE_LEVEL, [100_000]) == ["", ""]
    assert BYTE_LEVEL.token_bytes(100_000) == b""


def test_bos_comes_first_once_and_only_where_wanted() -> None:
    tokenizer = Tokenizer(byte_level().to_str().encode(), bos=0)
    plain = BYTE_LEVEL.encode("one two")
    assert tokenizer.encode("one two") == [0, *plain]
    assert tokenizer.encode("<|endoftext|>one two") == [0, *plain]
    assert tokenizer.encode("one two", add_special_tokens=False) == plain
    assert BYTE_LEVEL.encode("one two") == plain


@given(st.text(max_size=20))
def test_the_bytes_of_tokens_are_the_bytes_of_the_text(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert b"".join(BYTE_LEVEL.token_bytes(token) for token in ids) == text.encode()


def test_bytes_of_sentencepiece_tokens() -> None:
    ids = [*spell("é🎉"), sentencepiece().token_to_id("▁cat")]
    assert b"".join(SENTENCEPIECE.token_bytes(token) for token in ids) == "é🎉 cat".encode()


def test_a_damaged_tokenizer_is_named() -> None:
    with pytest.raises(PlanError, match=r"tokenizer/tokenizer\.json"):
        Tokenizer(json.dumps({"model": {}}).encode())


def test_a_text_that_cannot_fit_is_refused_unread() -> None:
    tokenizer = Tokenizer(byte_level().to_str().encode(), most=10)
    longest = max(map(len, byte_level().get_vocab()))
    assert tokenizer.encode("x" * 160)
    assert tokenizer.encode("x" * max(160, 10 * longest))
    with pytest.raises(RequestError, match=rf"messages has 1000 characters.*is 10 tokens, of at most {longest}"):
        tokenizer.encode("x" * 1000, param="messages")


def test_a_tokenizer_that_truncates_or_pads_does_neither_here() -> None:
    source = PlainTokenizer.from_str(byte_level().to_str())
    source.enable_truncation(3)
    source.enable_padding(length=64)
    assert Tokenizer(source.to_str().encode()).encode("one two three") == byte_level().encode("one two three").ids
