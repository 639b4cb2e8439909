"""What somebody asked beside the trainer, for as long as it is answered: its own limits, and who is to be woken.

    ask -> the scheduler has a group of it -> tokens come, and are on file -> look wakes whoever reads along
                                           -> closed: all is answered, it was given up, or it failed

The texts are the payload's own (payload.py); they outlive the group here, until whoever asked has read them. Asking,
and what the scheduler is told of it, is in asking.py.
"""

from collections.abc import Callable, Sequence

from polyrl.ids import GroupId
from polyrl.manager.payload import SampleTokens
from polyrl.scheduling.core.commands import CloseAsked


class Question:
    def __init__(
        self, group: GroupId, texts: Sequence[SampleTokens], *, max_tokens: int, seed: int, wake: Callable[[], None]
    ) -> None:
        self.group = group
        self.texts = texts
        self.max_tokens = max_tokens
        self.seed = seed
        self.is_refused, self.detail = False, ""
        """What an engine last said about a failure of it: it cannot be done, or something broke."""
        self.closed: CloseAsked | None = None
        self._wake = wake
        self._num_seen = 0

    @property
    def num_samples(self) -> int:
        return len(self.texts)

    def look(self) -> None:
        """Wake whoever reads along if there is more to read."""
        num = sum(len(text.cells) + len(text.finish) for text in self.texts)
        if num != self._num_seen:
            self._num_seen = num
            self._wake()

    def close(self, command: CloseAsked) -> None:
        self.closed = command
        self._wake()
