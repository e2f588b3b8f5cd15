"""Stop strings: found in text across token boundaries, never sent to the client."""

from __future__ import annotations

from collections.abc import Sequence


class StopMatcher:
    """Cuts a growing text before the first stop string that completes in it.

    Text whose end may still grow into a stop string is held back. However the text is cut into
    pieces, the result is that of feeding it one character at a time: the stop string that completes
    first wins, and of several that complete together the one that starts first.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        if any(not stop for stop in stops):
            raise ValueError("a stop string is empty; it would stop before any text: leave it out")
        self._stops = tuple(stops)
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Add text and return the part that may be sent; nothing once a stop string matched."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        # What is held is a proper prefix of a stop, so no match lies in it alone.
        text = self._held + text
        self._held = ""
        ends = [
            (start + len(stop), start) for stop in self._stops if (start := text.find(stop)) >= 0
        ]
        if ends:
            self.matched = True
            return text[: min(ends)[1]]
        hold = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]

    def flush(self) -> str:
        """Return what is held back, at the end of the output."""
        held, self._held = self._held, ""
        return held


def _overlap(text: str, stop: str) -> int:
    """Length of the longest proper prefix of `stop` that `text` ends with."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0
