"""Episodes for tests: calls as plain lists, what the client delivers of them, and calls that are drawn at random."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from polyrl.client import EpisodeCall, Group, Origin, Sample
from polyrl.trainer.batch import TrainSample
from polyrl.trainer.sequences import train_samples
from polyrl.wire.frames import Segment

ORIGIN = Origin(0, 0, 0)


class Played(NamedTuple):
    """An episode: what the policy saw and drew at each call."""

    calls: Sequence[tuple[Sequence[int], Sequence[int]]]
    reward: float = 0.0
    finish: str = "stop"
    logprobs: Sequence[float] | None = None
    """Of all drawn tokens, call by call."""
    segments: Sequence[Segment] = (Segment(0, 0, "w", engine="e"),)
    untrained: Sequence[int] = ()
    """Numbers of calls that the environment does not pay for."""

    @property
    def drawn(self) -> list[int]:
        return [token for _, drawn in self.calls for token in drawn]


def delivered(played: Played, number: int = 0) -> Sample:
    calls: list[EpisodeCall] = []
    end = 0
    for call, (prompt, drawn) in enumerate(played.calls):
        is_trained = call not in played.untrained
        calls.append(EpisodeCall(np.array(prompt, np.int32), end, end + len(drawn), "stop", is_trained))
        end += len(drawn)
    calls[-1] = calls[-1]._replace(finish=played.finish)
    tokens = np.array(played.drawn, np.int32)
    logprobs = np.array(np.zeros(end) if played.logprobs is None else played.logprobs, np.float32)
    return Sample(
        number, tokens, logprobs, tuple(played.segments), played.finish, played.reward, ORIGIN, calls=tuple(calls)
    )


def no_prompt() -> np.ndarray[tuple[int], np.dtype[np.int32]]:
    raise AssertionError("an episode has no prompt but those of its calls")


def group_of(episodes: Sequence[Played], number: int = 0) -> list[TrainSample]:
    """The training sequences of a group."""
    samples = tuple(delivered(one, index) for index, one in enumerate(episodes))
    return train_samples(Group(0, number, samples, ORIGIN), no_prompt)


def draw_episode(
    rng: np.random.Generator, vocab: int, prompt: list[int], num_calls: int, *, max_drawn: int = 4
) -> list[tuple[list[int], list[int]]]:
    """Draw calls that go on with an earlier one, fork from it, or begin anew, and draw one to four tokens each."""

    def some(least: int, most: int) -> list[int]:
        return rng.integers(3, vocab, rng.integers(least, most + 1)).tolist()

    calls: list[tuple[list[int], list[int]]] = []
    for number in range(num_calls):
        seen = prompt
        if number:
            base, answer = calls[int(rng.integers(len(calls)))]
            match int(rng.integers(3)):
                case 0:  # the conversation goes on; from an earlier call, this is a fork
                    seen = [*base, *answer, *some(0, 3)]
                case 1:
                    seen = [*calls[-1][0], *calls[-1][1], *some(1, 3)]
                case _:  # the history was compacted
                    seen = [*prompt, *some(1, 4)]
        calls.append((seen, some(1, max_drawn)))
    return calls
