"""One answer: text, cut at stop strings; counts and log-probabilities that fit it; the same streamed and whole."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.messages import Logprob, Output, SamplingParams, TokenLogprobs
from llmc.runtime.sequence import Delta, Sequence
from llmc.runtime.text import Tokenizer
from tests.unit.runtime.fake_plan import byte_level

TOKENIZER = Tokenizer(byte_level().to_str().encode())


def start(**params: object) -> Sequence:
    return Sequence(SamplingParams(**params), 3, TOKENIZER.detokenizer())  # type: ignore[arg-type]


def output(tokens: list[int], finish: str | None = None, **more: object) -> Output:
    logprobs = [TokenLogprobs(-1.0, 1, [Logprob(t, -1.0)]) for t in tokens]
    return Output("r", tokens, logprobs, finish, **more)  # type: ignore[arg-type]


def feed(sequence: Sequence, text: str, chunk: int, finish: str | None = "length") -> list[Delta]:
    ids = TOKENIZER.encode(text)
    parts = [ids[i : i + chunk] for i in range(0, len(ids), chunk)]
    deltas = []
    for i, part in enumerate(parts):
        deltas.append(sequence.accept(output(part, finish if i == len(parts) - 1 else None)))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def whole(deltas: list[Delta]) -> Delta:
    total = Delta()
    for delta in deltas:
        total.merge(delta)
    return total


@pytest.mark.parametrize("chunk", [1, 2, 100])
def test_an_answer_up_to_a_stop_string(chunk: int) -> None:
    sequence = start(stop=("STOP",))
    total = whole(feed(sequence, "one two STOP three", chunk))
    assert (total.text, total.finish_reason, total.stop_reason) == ("one two ", "stop", "STOP")
    shown = [TOKENIZER.token_bytes(entry.token).decode() for entry in total.entries]
    assert "".join(shown).startswith("one two")
    assert all(entry.offset < len(total.text) for entry in total.entries)
    counted = TOKENIZER.decode(total.tokens)
    assert counted.endswith("STOP")
    assert total.counts is not None
    assert total.counts.completion_tokens == len(total.tokens)


def test_the_stop_string_can_be_kept() -> None:
    total = whole(feed(start(stop=("STOP",), include_stop_str_in_output=True), "one STOP two", 1))
    assert total.text == "one STOP"
    assert TOKENIZER.decode([e.token for e in total.entries]) == "one STOP"


@given(
    st.text(alphabet="ab日🎉 ", max_size=20), st.lists(st.text(alphabet="ab日 ", min_size=1, max_size=3), max_size=2)
)
def test_the_answer_does_not_depend_on_how_tokens_arrive(text: str, stops: list[str]) -> None:
    if not text:
        return
    single, together = (start(stop=tuple(stops)) for _ in range(2))
    a, b = whole(feed(single, text, 1)), whole(feed(together, text, 100))
    assert a == b


def test_entries_wait_for_their_text() -> None:
    sequence = start(stop=("abc",))
    a, b, x = (TOKENIZER.encode(c)[0] for c in "abx")
    assert sequence.accept(output([a])).entries == []
    assert sequence.accept(output([b])).entries == []
    last = sequence.accept(output([x]))
    assert (last.text, [e.token for e in last.entries]) == ("abx", [a, b, x])


def test_entries_of_parts_of_a_character_come_with_it() -> None:
    parts = TOKENIZER.encode("🎉")
    sequence = start()
    released = [len(sequence.accept(output([token])).entries) for token in parts]
    assert released == [*([0] * (len(parts) - 1)), len(parts)]


def test_a_held_back_beginning_is_shown_at_the_end() -> None:
    total = whole(feed(start(stop=("STOP",)), "go ST", 1))
    assert (total.text, total.finish_reason, total.stop_reason) == ("go ST", "length", None)


def test_stop_tokens_count_but_are_not_shown() -> None:
    sequence = start(stop_token_ids=(7,))
    sequence.accept(output(TOKENIZER.encode("one")))
    last = sequence.accept(output([], "stop", stop_token=7))
    assert (last.text, last.stop_reason, sequence.completion_tokens) == ("", 7, len(TOKENIZER.encode("one")) + 1)


def test_the_models_own_end_is_no_stop_reason() -> None:
    assert start().accept(output([], "stop", stop_token=2)).stop_reason is None


def test_stop_strings_wait_for_min_tokens() -> None:
    x = TOKENIZER.encode("x")
    sequence = start(stop=("x",), min_tokens=3)
    for _ in range(3):
        assert sequence.accept(output(x)).text == "x"
    assert sequence.accept(output(x)).stop_reason == "x"
    assert sequence.completion_tokens == 4


def test_errors_and_cached_tokens_are_passed_on() -> None:
    sequence = start()
    sequence.accept(output(TOKENIZER.encode("one"), cached_tokens=2))
    last = sequence.accept(output([], "error", error="rank 1 died"))
    assert (last.finish_reason, last.error, sequence.cached_tokens) == ("error", "rank 1 died", 2)
