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
    """Tokens that were drawn: by a step, one of each sample whose token was wanted; or of one sample, several."""

    tokens: list[int]
    logprobs: list[float]


def by_sample(drawn: Sequence[Drawn]) -> list[Drawn]:
    """Turn an entry for each step into an entry for each sample."""
    tokens = zip(*(one.tokens for one in drawn), strict=True)
    logprobs = zip(*(one.logprobs for one in drawn), strict=True)
    return [Drawn(list(its), list(theirs)) for its, theirs in zip(tokens, logprobs, strict=True)]


class Drafted(NamedTuple):
    """A sample whose draft is verified: a row for its newest token, and one for each token of the draft."""

    tokens: list[int]
    start: int
    """The position of the first, in prompt and answer together."""
    blocks: Sequence[int]
    rule: DrawRule
    """For the token after the first; the others have the positions that follow."""

    @property
    def rules(self) -> list[DrawRule]:
        """How the token after each row is drawn."""
        sampling, seed, position = self.rule
        return [DrawRule(sampling, seed, position + number) for number in range(len(self.tokens))]


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

    def prepare_rows(self, num_samples: int, rows: int) -> float:
        """Get ready to verify drafts of so many samples, with `rows` rows of each. Returns the seconds that it took."""
        ...

    def verify(self, samples: Sequence[Drafted], rows: int) -> list[Drawn]:
        """Compute the rows of all samples, at most `rows` of each, and draw the token after every row.

        A row sees the rows before it. Returns an entry for each sample.
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
