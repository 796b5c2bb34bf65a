"""Stop strings: cuts a growing text at the first one, and never gives out anything past it."""

from __future__ import annotations

from collections.abc import Sequence


class StopStrings:
    """Watches one text. The stop that is complete first wins, of several at once the longest.

    What may be the beginning of a stop is held back until the text goes on, so what was given out
    never has to be taken back, and does not depend on how the text was cut into pieces.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.found = False

    def push(self, text: str) -> str:
        """Takes the next piece of text, returns what can be given out (possibly nothing)."""
        text = self._held + text
        # A stop starts in what was held back or later: what is gone could not begin one.
        places = ((text.find(stop), stop) for stop in self._stops)
        ends = [(start + len(stop), start) for start, stop in places if start >= 0]
        if ends:
            self.found, self._held = True, ""
            return text[: min(ends)[1]]
        cut = len(text) - max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[cut:]
        return text[:cut]

    def flush(self) -> str:
        """Ends the text: what was held back is no stop after all."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of the text that the stop begins with, the whole stop excepted."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
