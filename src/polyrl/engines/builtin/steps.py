"""The interface to runners of the model's steps, on the CPU (runner.py) and on a GPU (cuda/runner.py)."""

from collections.abc import Callable, Sequence
from threading import Event
from typing import NamedTuple, Protocol

from polyrl.engines.builtin.batching import Chunk
from polyrl.wire.frames import Sampling

MAX_BURST = 64
"""Steps of a burst that is looked at while it runs."""


class DrawRule(NamedTuple):
    """How a sample's next token is drawn."""

    sampling: Sampling
    seed: int
    position: int
    """The position of the token in the sample's answer."""


class Drawn(NamedTuple):
    """The tokens that a step drew: an entry for each sample whose token was wanted."""

    tokens: list[int]
    logprobs: list[float]


OnDrawn = Callable[[list[Drawn]], None]


class StepRunner(Protocol):
    """Called on the engine's own thread."""

    shows_bursts: bool
    """A burst shows its steps while it runs, goes on when an answer is over, and truncates nothing."""

    def run(self, chunks: Sequence[Chunk], wanted: Sequence[DrawRule]) -> Drawn:
        """Run any step. `wanted` has an entry for each chunk that samples, in order."""
        ...

    def run_burst(
        self,
        chunks: Sequence[Chunk],
        wanted: Sequence[DrawRule],
        num_steps: int,
        interrupted: Event | None = None,
        look: OnDrawn | None = None,
    ) -> list[Drawn]:
        """Draw up to `num_steps` tokens of each sample. All chunks decode, and have blocks.

        Once interrupted, by any thread, it ends with the steps already launched. A runner that shows bursts passes
        steps to `look` as they come, and returns the remaining ones.
        """
        ...

    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        """Copy blocks of the cache to others; all are read before any is written."""
        ...

    def change_weights(self, write: Callable[[], None] | None) -> None:
        """Change the weights by `write`; None: they are changed already. Works awake or asleep."""
        ...

    def sleep(self) -> None:
        """Free the memory of the cache, and of weights that are to be offloaded. The cache must be computed again."""
        ...

    def wake(self) -> None:
        """Wake with an empty cache."""
        ...

    def close(self) -> None: ...
