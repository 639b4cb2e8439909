"""The recipe's prompts, as the fleet, the trainer and the rewards want them."""

from typing import Protocol

import numpy as np

Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]


class Tasks(Protocol):
    """Domains by number, prompts by number within their domain. Validation's prompts are numbered by themselves."""

    @property
    def num_prompts(self) -> list[int]: ...

    @property
    def names(self) -> list[str]: ...

    def tokens(self, domain: int, prompt: int) -> Tokens: ...

    async def score(self, domain: int, prompt: int, answer: list[int], finish: str, *, validation: bool) -> float:
        """Raises if there is no reward: it is never a zero."""
        ...

    def validation_tokens(self, domain: int) -> list[Tokens]: ...
