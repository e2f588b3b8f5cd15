from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from hybridspec.server.stop_strings import StopMatcher

# A small alphabet makes overlaps and false starts common.
TEXT = st.text("ab\né", max_size=24)
STOPS = st.lists(st.text("ab\né", min_size=1, max_size=4), max_size=4)
CUTS = st.lists(st.integers(0, 24), max_size=8)


def by_definition(text: str, stops: list[str]) -> tuple[str, bool]:
    """One character at a time: stop at the first end of a stop string, cut before its start."""
    for end in range(1, len(text) + 1):
        starts = [end - len(stop) for stop in stops if text[:end].endswith(stop)]
        if starts:
            return text[: min(starts)], True
    return text, False


@given(text=TEXT, stops=STOPS, cuts=CUTS)
@example(text="abcd", stops=["abcd", "bc"], cuts=[])
@example(text="aaab", stops=["aab"], cuts=[1, 2, 3])
def test_any_cut_gives_the_text_before_the_first_stop(
    text: str, stops: list[str], cuts: list[int]
) -> None:
    matcher = StopMatcher(stops)
    bounds = sorted({0, len(text), *(min(cut, len(text)) for cut in cuts)})
    sent = ""
    for start, end in pairwise(bounds):
        sent += matcher.push(text[start:end])
        # Nothing that is sent may have to be taken back.
        assert by_definition(text, stops)[0].startswith(sent)
    expected, stopped = by_definition(text, stops)
    assert matcher.matched is stopped
    assert (sent if stopped else sent + matcher.flush()) == expected


@given(text=TEXT, stops=STOPS)
def test_holds_back_no_more_than_a_beginning_stop(text: str, stops: list[str]) -> None:
    matcher = StopMatcher(stops)
    matcher.push(text)
    held = matcher.flush()
    if matcher.matched:
        assert held == ""
    else:
        assert held == "" or any(stop.startswith(held) and stop != held for stop in stops)


def test_nothing_follows_a_match() -> None:
    matcher = StopMatcher(["\n"])
    assert matcher.push("a\nb") == "a"
    assert matcher.push("c") == ""
    assert matcher.flush() == ""


def test_empty_stop_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        StopMatcher(["a", ""])
