"""Stop strings, found in text as it streams: independent of how the text was cut into tokens.

Comes in: pieces of text. Goes out: text that may be shown, and the stop string that ended it. Text that could still
become a stop string is held back, so that no part of one is ever shown. Must not know: tokens, requests.
"""

from __future__ import annotations


class StopMatcher:
    """Watches one answer. The stop string whose last character comes first wins; of several, the longest."""

    def __init__(self, stops: tuple[str, ...], include: bool = False) -> None:
        self._stops = stops
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def push(self, text: str, armed: bool = True) -> str:
        """Takes more text; returns what may be shown now. After a match `matched` is set and nothing more comes.

        Text pushed with `armed` False is passed on and cannot be part of a stop string (min_tokens).
        """
        if not self._stops:
            return text
        if not armed:
            return self.flush() + text
        held = self._held + text
        if (found := self._first(held)) is not None:
            start, stop = found
            self.matched = stop
            self._held = ""
            return held[: start + len(stop)] if self._include else held[:start]
        keep = self._unfinished(held)
        self._held = held[len(held) - keep :]
        return held[: len(held) - keep]

    def flush(self) -> str:
        """What was held back; call it at the end, when nothing can complete a stop string any more."""
        held, self._held = self._held, ""
        return held

    def _first(self, text: str) -> tuple[int, str] | None:
        best: tuple[int, int] | None = None
        chosen = ""
        for stop in self._stops:
            start = text.find(stop)
            if start < 0:
                continue
            key = (start + len(stop), start)
            if best is None or key < best:
                best, chosen = key, stop
        return None if best is None else (best[1], chosen)

    def _unfinished(self, text: str) -> int:
        """Length of the longest end of `text` that begins a stop string."""
        longest = 0
        for stop in self._stops:
            for size in range(min(len(stop) - 1, len(text)), longest, -1):
                if text.endswith(stop[:size]):
                    longest = size
                    break
        return longest
