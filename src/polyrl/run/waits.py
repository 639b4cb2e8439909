"""The waits of a run that are worth a look: those that the user may have to end, before the deadlines that always run.

Every worker has a heartbeat and, while it generates, a deadline for its next token: in a fleet of a thousand these are
two thousand waits, and say nothing. They come last here, and are counted where they do not fit.
"""

from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from polyrl.wire.control import WaitStatus

_NAMED = (
    "trainer",
    "weights",
    "prompts",
    "hosts",
    "workers",
    "reward workers",
    "a resume",
    "hand_over",
    "retry_pull",
    "pull",
    "switch",
    "notice",
    "drain",
    "host_drain",
)
ENDED_BY = {
    "trainer": "a trainer that dials in: polyrl train --resume",
    "weights": "the trainer, which publishes them",
    "prompts": "the trainer, which sends them",
    "hosts": "a host that joins",
    "workers": "a worker that can write",
    "reward workers": "a reward worker that joins",
    "a resume": "POST /v1/resume",
    "heartbeat": "any news; without it, the worker is lost",
    "unheard": "its news; without it, others go on with its samples",
    "stall": "its next tokens; without them, others go on with its samples",
    "hand_over": "its last tokens; without them, others go on from those that came",
    "pull": "the weights' arrival, or another try",
    "retry_pull": "another try",
    "switch": "its devices; if they fail to, the worker is lost",
    "notice": "its machine, which goes; it hands over before",
    "drain": "its last sample handed over; if it fails to, the worker is lost",
    "reward": "the reward; without it, the sample is dropped",
    "seed": "remote workers that take over, or all answers written",
    "balance": "a look at whether samples should move",
    "turn": "the environment's answer; without it, the episode ends",
    "episode": "its end, which comes at the limit at the latest",
    "host_drain": "its last episode's end; others begin the rest again",
}
"""The end of each wait. Waits with a deadline end by themselves then."""
_OF_EPISODES = ("turn", "episode")
"""Named as well where there is room: every episode that is played has them."""
_SLOW_REWARD_S = 2.0
_MOST_OF_A_KIND = 3
"""So that a thousand turns do not hide a worker that is drained, and do not fill a page."""


class ChosenWaits(NamedTuple):
    shown: list[WaitStatus]
    more: dict[str, int]
    """How many others there are, by their name."""


def is_news(wait: WaitStatus) -> bool:
    """Return whether a wait is worth a line by itself: a deadline that is always pending is not."""
    is_slow_reward = wait.what == "reward" and wait.age_s is not None and wait.age_s > _SLOW_REWARD_S
    return wait.what in _NAMED or is_slow_reward


def choose(waits: Sequence[WaitStatus], most: int) -> ChosenWaits:
    """Return the `most` waits that tell most. `waits` come as the manager sorts them: the most urgent first."""
    if len(waits) <= most:
        return ChosenWaits([*waits], {})
    num_of, ranked = Counter[str](), list[tuple[int, int]]()
    for place, wait in enumerate(waits):
        is_named = wait.given_up_in_s is None or is_news(wait) or wait.what in _OF_EPISODES
        num_of[wait.what] += 1
        if num_of[wait.what] <= _MOST_OF_A_KIND:
            ranked.append((0 if is_named else 1, place))
    chosen = [waits[place] for _, place in sorted(ranked)[:most]]
    more = num_of - Counter(one.what for one in chosen)
    return ChosenWaits(chosen, dict(sorted(more.items())))
