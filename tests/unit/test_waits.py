"""Of thousands of waits, those that tell something are shown, and the others are counted."""

from collections import Counter
from typing import get_args

from tests.unit.played import Manager

from polyrl.manager.status import status
from polyrl.run.waits import _NAMED, ENDED_BY, choose
from polyrl.scheduling.core.deadlines import WaitName
from polyrl.wire.control import WaitStatus

ALWAYS = ("heartbeat", "stall", "seed", "balance")


def wait(what: str, of: str, left_s: float | None = 5.0, age_s: float | None = 1.0) -> WaitStatus:
    return WaitStatus(what=what, of=of, age_s=age_s, given_up_in_s=left_s)


def fleet_of(num: int) -> list[WaitStatus]:
    """The deadlines that always run in a fleet, the nearest first."""
    return [wait(what, f"w{n}", left_s) for left_s, what in ((4.0, "heartbeat"), (60.0, "stall")) for n in range(num)]


def test_what_somebody_may_have_to_end_comes_before_deadlines_that_always_run():
    told = [
        wait("prompts", "3 groups", None),
        *fleet_of(20),
        *(wait("pull", f"w{n}", 90.0) for n in range(8)),
        wait("drain", "w9", 100.0),
        wait("turn", "episode 4/0", 300.0),
        wait("reward", "mine:slow, 2 run", 500.0, age_s=30.0),
    ]
    chosen = choose(told, 12)
    assert [one.what for one in chosen.shown] == [
        "prompts", "pull", "pull", "pull", "drain", "turn", "reward", *["heartbeat"] * 3, *["stall"] * 2,
    ]  # fmt: skip
    assert chosen.more == {"heartbeat": 17, "pull": 5, "stall": 18}
    assert len(chosen.shown) + sum(chosen.more.values()) == len(told)


def test_a_reward_that_has_just_begun_is_no_news():
    chosen = choose([*fleet_of(20), wait("reward", "mine:quick, 2 run", 100.0, age_s=0.1)], 12)
    assert [one.what for one in chosen.shown] == [*["heartbeat"] * 3, *["stall"] * 3, "reward"]
    assert chosen.more == {"heartbeat": 17, "stall": 17}


def test_few_waits_are_all_shown_as_they_come_where_none_is_named():
    few = fleet_of(2)
    assert choose(few, 12) == (few, {})


def test_deadlines_that_always_run_have_an_age(tmp_path):
    manager, seen = Manager(tmp_path, 5), Counter[str]()
    for _ in range(150):
        manager.play()
        for one in status(manager.lobby, 0.0).waits:
            if one.what in ALWAYS:
                seen[one.what] += 1
                assert one.age_s is not None and 0.0 <= one.age_s <= manager.lobby.now(), one
    assert {"heartbeat", "stall", "balance"} <= seen.keys()
    manager.service.close()


def test_every_wait_says_what_ends_it():
    assert ENDED_BY.keys() == {*get_args(WaitName), *_NAMED}
