"""The training loop over groups of episodes: what is trained, what is rejected, and what is told of the step."""

import asyncio
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from tests.integration.test_loop import CountingSteps, Listener, Publisher, make_recipe
from tests.telemetry.test_metrics import a_line
from tests.trainer.episodes import ORIGIN, Played, delivered, no_prompt

from polyrl.client import Group
from polyrl.trainer.batch import check_samples
from polyrl.trainer.devices import Devices
from polyrl.trainer.loop import Loop
from polyrl.trainer.replicas import Replicas
from polyrl.trainer.reports import StepReport
from polyrl.wire.frames import Segment

TURNS = [([1, 2], [3, 4]), ([1, 2, 3, 4, 5], [6])]
BRANCHES = [*TURNS, ([1, 9], [7, 8, 9])]


class OneRound:
    """A fleet that delivers these groups in one round, with the part of the client's contract that the loop uses."""

    def __init__(self, groups: list[Group]) -> None:
        self.opened = SimpleNamespace(open_steps=())
        self.digests: dict[int, tuple[str, ...]] = {}
        self.taken: list[int] = []
        self.rejected: list[int] = []
        self._groups = groups

    async def round(self, step: int) -> AsyncIterator[Group]:
        for group in self._groups:
            yield group

    async def take(self, *groups: Group, worker: str = "") -> None:
        self.taken += [one.id for one in groups]

    async def reject(self, group: Group, reason: str, *, workers: Any = ()) -> None:
        self.rejected.append(group.id)

    async def line(self, step: int) -> Any:
        return a_line(step)

    async def nothing(self, *_: Any, **__: Any) -> None: ...

    micro_batch_done = step_done = settled = publish = request = nothing


def play(*groups: list[Played]) -> tuple[OneRound, CountingSteps, StepReport]:
    made = [
        Group(0, number, tuple(delivered(one, index) for index, one in enumerate(group)), ORIGIN)
        for number, group in enumerate(groups)
    ]
    fleet, steps, listener = OneRound(made), CountingSteps(), Listener()
    devices = Devices()
    world: Any = fleet
    loop = Loop(
        make_recipe("train.steps=1"), world, Replicas(steps, devices), Publisher(), lambda *_: no_prompt(), listener
    )
    asyncio.run(loop.run())
    devices.close()
    return fleet, steps, listener.reports[0]


def test_a_step_of_episodes_tells_each_of_them_once():
    segments = [Segment(0, 0, "w", engine="e"), Segment(3, -1, "w", engine="e")]
    fleet, steps, report = play([Played(BRANCHES, 1.0, segments=segments), Played(TURNS, 0.0)])
    assert (fleet.taken, fleet.rejected) == ([0], [])
    check_samples(steps.groups)
    assert [one.num_drawn for one in steps.groups[0]] == [3, 3, 3]
    assert report.rewards == [1.0, 0.0]
    assert (report.lengths, report.prompt_lengths) == ([6, 3], [2, 2])
    assert report.tokens_by_age == {0: 6, 1: 3} and report.num_mixed == 1
    assert StepReport.decode(report.encode()).lengths == [6, 3]


def test_equal_rewards_are_found_by_episodes_and_their_sequences_do_not_hide_them():
    fleet, steps, report = play(
        [Played(BRANCHES, 0.5), Played(TURNS, 0.5)], [Played(TURNS, 1.0), Played(BRANCHES, 0.0)]
    )
    assert (fleet.taken, fleet.rejected, report.num_filtered) == ([1], [0], 1)
    assert sorted(report.rewards) == [0.0, 0.5, 0.5, 1.0] and len(steps.groups) == 1


@pytest.mark.parametrize("rewards", [(1.0, 0.0), (0.0, 0.0)])
def test_a_group_in_which_nothing_was_drawn_is_rejected(rewards: tuple[float, ...]):
    fleet, _, report = play([Played([([1], [])], reward) for reward in rewards], [Played(TURNS, 1.0), Played(TURNS)])
    assert (fleet.taken, fleet.rejected) == ([1], [0])
    assert report.lengths == [3, 3]
