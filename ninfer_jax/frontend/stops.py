"""Stop strings over a stream of text.

The output ends at the first character at which any stop string is complete. If several are complete
at that character, the longest counts, so that no part of it stays in the text. For stop strings
that do not contain one another this is the leftmost match in the full text; where one contains
another it is the only rule that neither depends on how the text was cut into tokens nor asks for
tokens beyond a stop that is already there.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class StopMatch:
    """The stop string that was found."""

    stop: str


@dataclass(frozen=True)
class StopMatcher:
    """The state of the search. Immutable: `push` returns the next state.

    `held` is the longest end of the text so far that is a proper beginning of a stop string:
    exactly what may still match, and never longer than the longest stop string less one.
    """

    stops: tuple[str, ...]
    include_stop: bool = False
    """Keep the matched string in the text."""
    held: str = ""

    def push(
        self, text: str, *, may_stop: bool = True
    ) -> tuple[StopMatcher, str, StopMatch | None]:
        """The state after `text`, the text that may now be shown, and the match if there is one.

        Args:
            text: the next piece, of any length.
            may_stop: False while `min_tokens` holds: a stop string completed within this piece does
                not count. One that begins here and is completed by a later piece does.
        """
        if not self.stops or not text:
            return self, text, None
        buffer = self.held + text
        if may_stop and (found := self._first(buffer)) is not None:
            end, stop = found
            shown = buffer[: end if self.include_stop else end - len(stop)]
            return StopMatcher(self.stops, self.include_stop), shown, StopMatch(stop)
        keep = self._longest_beginning(buffer)
        cut = len(buffer) - keep
        return StopMatcher(self.stops, self.include_stop, buffer[cut:]), buffer[:cut], None

    def flush(self) -> tuple[StopMatcher, str]:
        """The state with nothing held back, and what was: the text is over, nothing can match any
        more."""
        return StopMatcher(self.stops, self.include_stop), self.held

    def _first(self, buffer: str) -> tuple[int, str] | None:
        """The end and the string of the match that is complete first."""
        best: tuple[int, str] | None = None
        for stop in self.stops:
            # A match must end in the new text: one that ends earlier was forbidden when it was
            # complete.
            start = buffer.find(stop, max(0, len(self.held) + 1 - len(stop)))
            if start < 0:
                continue
            end = start + len(stop)
            if best is None or (end, -len(stop)) < (best[0], -len(best[1])):
                best = end, stop
        return best

    def _longest_beginning(self, buffer: str) -> int:
        longest = 0
        for stop in self.stops:
            for size in range(min(len(stop) - 1, len(buffer)), longest, -1):
                if buffer.endswith(stop[:size]):
                    longest = size
                    break
        return longest
