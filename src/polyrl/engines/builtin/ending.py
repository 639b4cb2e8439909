"""Where an answer ends: with an id that ends it, with the token that completes a stop string, or at its length."""

from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

_TEXTLESS_TOKENS = 16
"""A stop string is searched in this many more tokens than it has bytes: some tokens have no text of their own."""
_BYTES_OF_A_CHARACTER = 4
"""At most. Where a text begins inside of a character, a tokenizer of bytes may decode none of so many tokens."""
_NOTHING = "\ufffd"

End = Literal["stop", "length"]


class Ending(NamedTuple):
    """The conditions that end one sample's answer."""

    num_prompt: int
    ids: frozenset[int]
    stops: Sequence[str] = ()
    decode: Callable[[list[int]], str] = str

    def find(self, text: list[int], new: Sequence[int], room: int) -> tuple[int, End | None]:
        """Return how many of the new tokens belong to the answer, and the end that the last of them is, if any.

        `text` is prompt and answer so far, with room for `room` more tokens.
        """
        if not self.stops and self.ids.isdisjoint(new):
            return (len(new), None) if len(new) < room else (room, "length")
        most = self._num_looked_at + _BYTES_OF_A_CHARACTER
        answer = text[max(self.num_prompt, len(text) - most) :]
        for num, token in enumerate(new, 1):
            answer.append(token)
            if self.is_over(answer):
                return num, "stop"
            if num == room:
                return num, "length"
        return len(new), None

    def is_over(self, answer: list[int]) -> bool:
        """Return whether its last token ends it."""
        if answer[-1] in self.ids:
            return True
        if not self.stops:
            return False
        for more in range(_BYTES_OF_A_CHARACTER):
            text = self.decode(answer[-self._num_looked_at - more :])
            if any(stop in text for stop in self.stops):
                return True
            if _NOTHING not in text:
                break
        return False

    @property
    def _num_looked_at(self) -> int:
        """Last tokens that hold the longest stop string: each of its tokens is a byte of it or more."""
        return _TEXTLESS_TOKENS + max((len(stop.encode()) for stop in self.stops), default=0)
