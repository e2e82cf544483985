"""Stop strings: found wherever text is cut, and no part of one is ever shown."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from llmc.runtime.stops import StopMatcher

LETTERS = st.text(alphabet="ab", max_size=12)
STOPS = st.lists(st.text(alphabet="ab", min_size=1, max_size=4), min_size=1, max_size=3)


def reference(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """Grows the text by single characters until it ends with a stop string."""
    for end in range(1, len(text) + 1):
        found = [stop for stop in stops if text[:end].endswith(stop)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@given(st.lists(LETTERS), STOPS, st.booleans())
def test_the_result_does_not_depend_on_how_text_is_cut(pieces: list[str], stops: list[str], include: bool) -> None:
    matcher = StopMatcher(tuple(stops), include)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        if matcher.matched is not None:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.matched) == reference("".join(pieces), stops, include)


@given(st.lists(LETTERS), STOPS)
def test_nothing_is_shown_that_a_stop_string_would_take_back(pieces: list[str], stops: list[str]) -> None:
    matcher = StopMatcher(tuple(stops))
    final, _ = reference("".join(pieces), stops, False)
    shown = ""
    for piece in pieces:
        shown += matcher.push(piece)
        assert final.startswith(shown)
        if matcher.matched is not None:
            break


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(("STOP",))
    assert matcher.push("go on ST") == "go on "
    assert matcher.push("AY") == "STAY"
    assert matcher.flush() == ""


def test_a_stop_string_over_many_pieces() -> None:
    matcher = StopMatcher(("\n\nUser:",))
    pieces = ["Yes.", "\n", "\n", "Us", "er", ":", " more"]
    shown = []
    for piece in pieces:
        shown.append(matcher.push(piece))
        if matcher.matched:
            break
    assert shown == ["Yes.", "", "", "", "", ""]
    assert matcher.matched == "\n\nUser:"


@pytest.mark.parametrize(("include", "text"), [(False, "a"), (True, "aEND")])
def test_the_stop_string_is_left_out_or_kept(include: bool, text: str) -> None:
    assert StopMatcher(("END",), include).push("aENDb") == text


def test_text_before_min_tokens_does_not_stop() -> None:
    matcher = StopMatcher(("x",))
    assert matcher.push("axb", armed=False) == "axb"
    assert matcher.push("cx") == "c"
    assert matcher.matched == "x"
