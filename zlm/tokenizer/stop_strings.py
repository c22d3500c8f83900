"""Finds stop strings in text that arrives in pieces, and holds back what could become one.

Pure: text in, text out. The rule: with p(s) the place where stop string s first stands in the
whole text, the text ends at the smallest p(s). That holds however the text is cut into pieces, and
adding a stop string can only make the text shorter. So text whose end could be the start of a stop
string is held back, and a stop string that is complete waits while one that began earlier may
still be completed:

    stops  "abcdef", "cd"      text "xabcd"  ->  "x" is sent, "abcd" held: "cd" waits for "abcdef"
    then "e", "f"              ->  ends before "abcdef";  then "z"  ->  ends before "cd"

Work is proportional to the new text: what is held is shorter than the longest stop string.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StopMatch:
    """A stop string in the text. ``start`` and ``end`` count characters from the text's start."""

    stop: str
    start: int
    end: int


class StopMatcher:
    """Follows one sequence's text. Owns the text held back."""

    __slots__ = ("_found", "_held", "_released", "_stops")

    def __init__(self, stops: list[str]) -> None:
        # Shortest first: of two that start together, the one completed first counts.
        self._stops = sorted(set(stops), key=len)
        self._held = ""
        self._released = 0  # characters of the text before the held ones
        self._found: StopMatch | None = None  # complete, waiting for one that began earlier

    def push(self, text: str, *, armed: bool = True) -> tuple[str, StopMatch | None]:
        """Take new *text*; return the text to send now and the match that ends it, if any.

        After a match nothing more must be pushed. With *armed* unset a stop string that ends in
        this text does not count (``min_tokens``), but one may begin in it.
        """
        if not text:
            return "", None
        buffer = self._held + text
        if armed:
            self._search(buffer)
        keep = self._earliest_start(buffer)
        if self._found is not None:
            found_at = self._found.start - self._released
            if keep >= found_at:
                return buffer[:found_at], self._found
        self._held = buffer[keep:]
        self._released += keep
        return buffer[:keep], None

    def flush(self) -> tuple[str, StopMatch | None]:
        """The text is over: return what was held, up to the match that waited, if any."""
        held, self._held = self._held, ""
        if self._found is None:
            return held, None
        return held[: self._found.start - self._released], self._found

    def _search(self, buffer: str) -> None:
        """Find the first stop string that ends in the new part of *buffer*."""
        held = len(self._held)
        for stop in self._stops:
            at = buffer.find(stop, max(0, held - len(stop) + 1))
            if at < 0:
                continue
            start = self._released + at
            if self._found is None or start < self._found.start:
                self._found = StopMatch(stop, start, start + len(stop))

    def _earliest_start(self, buffer: str) -> int:
        """Return where in *buffer* the first stop string may have begun that is not complete."""
        earliest = len(buffer)
        for stop in self._stops:
            at = buffer.find(stop[0], max(0, len(buffer) - len(stop) + 1), earliest)
            while at >= 0:
                if stop.startswith(buffer[at:]):
                    earliest = at
                    break
                at = buffer.find(stop[0], at + 1, earliest)
        return earliest
