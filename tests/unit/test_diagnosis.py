"""Each thing that a manager can say of a worker or a trainer becomes a sentence that is true of it."""

from typing import Any

import pytest
from msgspec.structs import replace

from polyrl.run.diagnosis import diagnose
from polyrl.wire.control import (
    HostStatus,
    RewardsStatus,
    RewardWorkerStatus,
    RoundStatus,
    Status,
    WaitStatus,
    WorkerStatus,
)

WORKER = WorkerStatus(
    name="w1", state="active", connected=True, engine="builtin", model="m", version=3, running=2, slots=4,
    engine_waiting=0, kv_used=0.1, tokens_per_s=100.0, price_usd_per_hour=1.0, spot=True, last_heard_s=0.2, usd=0.1,
)  # fmt: skip
ROUND = RoundStatus(
    step=3, kind="short", age_s=9.0, groups=4, samples_waiting=0, samples_running=2, samples_generated=14,
    groups_generated=2, groups_delivered=2, closed=False, longest_tokens=900, longest_on="w1",
)  # fmt: skip
STATUS = Status(
    run="open", paused=False, uptime_s=60.0, now_s=50.0, published=3, trainer="attached", workers=(WORKER,),
    rounds=(ROUND,), queues={"samples_running": 2}, waits=(), ledger={}, refused={}, max_new_tokens=1000,
)  # fmt: skip


HOST = HostStatus(
    name="h1", environment="calculator", connected=True, draining=False, playing=16, slots=16, price_usd_per_hour=0.1,
    last_heard_s=0.1, usd=0.01,
)  # fmt: skip


def told(now: Status) -> list[tuple[str, str]]:
    """Of a fleet that writes meanwhile."""
    earlier = replace(now, workers=tuple(replace(one, tokens_running=-1) for one in now.workers))
    return [(one.what, one.then) for one in diagnose(earlier, now).findings]


def test_a_worker_whose_short_answers_follow_each_other_does_not_stand_still():
    still = replace(WORKER, running=2, tokens_running=0, newest_lease=7)
    earlier, now = (replace(STATUS, workers=(replace(still, newest_lease=lease),)) for lease in (7, 9))
    assert "wrote nothing" in str(diagnose(earlier, earlier).findings)
    assert "wrote nothing" not in str(diagnose(earlier, now).findings)


def wait(what: str, of: str = "w1", age_s: float | None = None) -> WaitStatus:
    return WaitStatus(what=what, of=of, age_s=age_s, given_up_in_s=5.0)


@pytest.mark.parametrize(
    ("worker", "waits", "what", "then"),
    [
        (
            {"state": "pulling", "pulling": 4, "source": "w2"}, [wait("pull", age_s=3.0)],
            "w1 pulls version 4 from w2, for 3.0 s", "then it writes; given up in 5.0 s, and tried again",
        ),
        ({"state": "pulling", "pulling": 4}, [], "w1 pulls version 4 from the trainer", "then it writes"),
        ({"state": "waiting"}, [wait("retry_pull")], "w1 could not pull version 3", "it tries again in 5.0 s"),
        ({"state": "waiting"}, [], "w1 waits for weights", "it pulls as soon as a source has room to send"),
        (
            {"state": "down"}, [],
            "w1's engine is down", "the worker starts it again; its samples go on elsewhere meanwhile",
        ),
        (
            {"state": "draining"}, [wait("drain"), wait("drain", of="w0")],
            "w1 hands its 2 samples over", "then it leaves, in 5.0 s at the latest",
        ),
        (
            {"duty": "to_training"}, [wait("switch")],
            "w1's devices change hands (to training)", "in 5.0 s at the latest",
        ),
        (
            {"connected": False, "last_heard_s": 2.0, "running": 1}, [wait("heartbeat")],
            "w1 is away: nothing was heard of it for 2.0 s",
            "in 5.0 s it is given up, and what it ran (1 sample) goes on elsewhere; it may join again at any time",
        ),
    ],
)  # fmt: skip
def test_a_worker_that_does_not_write(worker: dict[str, Any], waits: list[WaitStatus], what: str, then: str):
    assert told(replace(STATUS, workers=(replace(WORKER, **worker),), waits=tuple(waits)))[1:] == [(what, then)]


def test_a_slow_reward_of_whole_groups_is_named_when_all_groups_are_with_the_trainer():
    rewards = RewardsStatus(running=2, timeout_s=5.0, longest_s=3.5, function="mine:rank", failed=0, why="")
    now = replace(STATUS, rounds=(replace(ROUND, groups_delivered=4, samples_running=0),), rewards=rewards)
    slow = diagnose(now, now, "runs/x").findings[0]
    with_us = "all 4 groups of step 3 are with the trainer, and rewards of whole groups run"
    assert slow.what == f"{with_us}; mine:rank has run longest, for 3.5 s"
    assert slow.then == "one that takes longer than rewards.timeout_s = 5 is ended, and its group replaced"


def test_a_slow_reward_is_named_with_its_own_time_limit_and_those_that_failed_are_counted():
    rewards = RewardsStatus(
        running=2, timeout_s=5.0, longest_s=3.5, function="mine:judge", failed=7, why="KeyError: 'x'"
    )
    round_ = replace(ROUND, samples_running=0)
    now = replace(STATUS, rounds=(round_,), queues={"rewards_running": 2, "rewards_waiting": 14}, rewards=rewards)
    slow, failed = diagnose(now, now, "runs/x").findings[:2]
    assert slow.what.endswith(
        "2 answers are being scored, 14 wait for it; mine:judge has run longest, for 3.5 s"
    ) and slow.then == ("one that takes longer than rewards.timeout_s = 5 is ended, and its sample dropped")
    assert slow.stalls and not slow.needs_help
    assert failed.what == "7 answers had no reward so far; the last: KeyError: 'x'"
    assert failed.do.startswith("runs/x/logs/rewards.log has what functions printed")


def test_answers_are_not_said_to_wait_for_none_that_is_scored():
    """How many functions run is told once a second, and may be of before they began."""
    rewards = RewardsStatus(running=0, timeout_s=5.0, longest_s=0.0, function="", failed=0, why="")
    queues = {"rewards_running": 0, "rewards_waiting": 46}
    now = replace(STATUS, rounds=(replace(ROUND, samples_running=0),), queues=queues, rewards=rewards)
    what = diagnose(now, now).findings[0].what
    assert what == "step 3 lacks 2 groups of 4: 46 answers are with the reward functions"


@pytest.mark.parametrize(
    ("setting", "do"),
    [
        (None, "where it is off, rounds.tail_batching packs"),
        ("off", "rounds.tail_batching (off now) packs"),
        ("short", "a lower rollout.max_new_tokens"),
    ],
)
def test_advice_on_last_answers_knows_whether_tail_batching_is_off(setting: str | None, do: str):
    assert diagnose(STATUS, STATUS, tail_batching=setting).findings[0].do.startswith(do)


def test_episodes_that_failed_are_counted_and_prompts_that_were_lost_to_them():
    ledger: dict[str, Any] = {"episodes_ended": {"scored": 24, "failed": 182}, "prompts_dropped": {"failed": 18}}
    now = replace(STATUS, ledger=ledger)
    failed = diagnose(now, now, "runs/x").findings[1]
    lost = "18 prompts lost so many that no group was left"
    assert failed.what == f"182 episodes failed so far, through no fault of the policy; {lost}"
    assert failed.do == "runs/x/logs/manager.log has the reasons"


@pytest.mark.parametrize(("states", "there"), [((), ""), (("draining", "joined"), "; r0 is draining; r1 is joined")])
def test_answers_without_a_reward_worker_need_one(states: tuple[str, ...], there: str):
    workers = [
        RewardWorkerStatus(
            name=f"r{n}", state=one, connected=True, places=2, running=0, scored=1, failed=0, last_heard_s=0.1
        )
        for n, one in enumerate(states)
    ]
    waits = (WaitStatus(what="reward workers", of="12 answers", age_s=9.0, given_up_in_s=None),)
    round_, queues = replace(ROUND, samples_running=0), {"rewards_waiting": 12}
    now = replace(STATUS, rounds=(round_,), queues=queues, waits=waits, reward_workers=workers)
    found = diagnose(now, now).findings[0]
    assert found.what.endswith(f": 12 answers wait to be scored, and no reward worker can{there}")
    assert found.then == "they wait as long as it takes: rewards.processes = 0" and found.needs_help
    assert found.do == "start a reward worker: polyrl worker --rewards --join URL --token-file reward.token"


def test_a_worker_that_writes_is_not_spoken_of_and_the_longest_answer_is():
    what = "step 3 lacks 2 groups of 4: the last 2 samples run, and none waits; the longest has 900 tokens, on w1"
    assert told(STATUS) == [(what, "it ends by itself, in about 2.0 s at most (1,000 tokens are allowed)")]
    waits = told(replace(STATUS, trainer_does="waits", trainer_since_s=7.0))
    assert waits[0][0].startswith("step 3 lacks 2 groups of 4, and the trainer has had nothing to do for 7.0 s: ")


@pytest.mark.parametrize(
    ("now", "what"),
    [
        ({"trainer_does": "trains", "trainer_since_s": 4.0}, "the trainer trains on groups of step 3, for 4.0 s"),
        ({"trainer_does": "validates", "trainer_since_s": 4.0}, "the trainer validates, for 4.0 s"),
        ({"published": -1}, "the trainer has not published a first version"),
        ({"trainer": "away"}, "the trainer is away"),
        ({"queues": {"groups_without_prompt": 2}}, "step 3 lacks 2 groups of 4: the trainer has not sent 2 prompts"),
        (
            {"rounds": (replace(ROUND, groups_delivered=4),)},
            "all 4 groups of step 3 are with the trainer, which has not said that it trains",
        ),
        (
            {"rounds": (replace(ROUND, samples_running=0),)},
            "step 3 lacks 2 groups of 4: all answers are written and scored",
        ),
    ],
)
def test_what_all_of_it_waits_for(now: dict[str, Any], what: str):
    assert told(replace(STATUS, **now))[0][0] == what


@pytest.mark.parametrize(
    ("hosts", "there"),
    [
        ((), ""),
        ((replace(HOST, connected=False), replace(HOST, name="h2", draining=True)), " (h1 is away, h2 is draining)"),
    ],
)
def test_episodes_without_a_host_need_one(hosts: tuple[HostStatus, ...], there: str):
    now = replace(STATUS, rounds=(replace(ROUND, episodes_unhosted=7),), hosts=hosts)
    found = diagnose(now, now)
    assert (
        found.findings[0].what
        == f"step 3 lacks 2 groups of 4: 7 episodes wait, and no host is there to play them{there}"
    )
    assert found.needs_help and found.findings[0].do.startswith("start a host: polyrl env play NAME --join URL")


def test_environments_that_have_the_move_are_told_with_their_limits():
    waits = (wait("turn", "episode 1/0"), replace(wait("episode", "episode 1/0"), given_up_in_s=40.0))
    now = replace(STATUS, rounds=(replace(ROUND, episodes_playing=5),), hosts=(HOST,), waits=waits)
    what, then = told(now)[0]
    assert what == "step 3 lacks 2 groups of 4: 5 episodes wait for their environment, and workers write in 2"
    assert then == (
        "each goes on with its environment's next call, or ends with a reward; the environment that is slowest to "
        "answer is given up in 5.0 s at the latest; the oldest episode ends in 40.0 s at the latest"
    )
    more = diagnose(now, replace(now, rounds=(replace(now.rounds[0], episodes_unhosted=30),))).findings[0]
    assert more.what.endswith("; 30 more wait for one of 16 places at hosts") and "environments.slots" in more.do


def test_no_worker_is_blamed_for_what_is_not_written_while_the_trainer_is_away():
    for trainer, then in (
        ("attached", "the manager looks in 5.0 s: what has no new token"),
        ("away", "no worker is blamed"),
    ):
        now = replace(STATUS, trainer=trainer, waits=(wait("stall"),))
        assert diagnose(now, now).findings[1].then.startswith(then)


def test_of_several_rounds_the_trainer_trains_the_oldest_first():
    later = replace(ROUND, step=4)
    now = replace(STATUS, rounds=(replace(ROUND, groups_delivered=4), later))
    assert told(now)[0][0].startswith("all 4 groups of step 3 are with the trainer")
    assert told(replace(STATUS, rounds=(ROUND, replace(later, groups_delivered=4))))[0][0].startswith("step 3 lacks 2")


def test_before_the_first_version_nobody_is_said_to_wait_for_room_to_pull_it():
    now = replace(STATUS, published=-1, rounds=(), workers=(replace(WORKER, state="waiting", running=0),))
    assert [what for what, _ in told(now)] == ["the trainer has not published a first version"]


def test_a_run_without_a_trainer_is_there_for_those_who_ask_and_wants_none():
    serving = replace(STATUS, trainer="none", rounds=(), queues={"samples_asked": 2}, published=0)
    found = diagnose(serving, serving)
    assert found.findings[0].what == "the run has no trainer and serves clients: 2 answers not ended"
    assert not found.needs_help
    alone = diagnose(serving, replace(serving, workers=()))
    assert alone.findings[0].what.endswith(", and no worker can write")
    assert alone.needs_help and "have a worker join" in alone.findings[0].do


def test_samples_that_no_worker_can_take():
    waiting = replace(STATUS, rounds=(replace(ROUND, samples_waiting=5),))
    pulling = replace(waiting, workers=(replace(WORKER, state="pulling", pulling=3),))
    gone = replace(waiting, workers=(), ledger={"workers_joined": 3, "workers_lost": 1})
    assert told(gone)[0][0].endswith("there is no worker (3 times one joined, 1 time one was lost)")
    leaving = replace(waiting, workers=(replace(WORKER, state="draining"),))
    for now, needs_help in ((pulling, False), (leaving, True)):
        found = diagnose(now, now)
        assert found.findings[0].what.endswith("5 samples wait, and no worker can write")
        assert found.needs_help == needs_help


def test_refusals_that_a_person_can_mend_are_explained_and_no_others():
    now = replace(STATUS, refused={"token": 1200, "late_lease": 4})
    assert told(now)[1][0].startswith("refused since the manager started: 1,200 requests without a token")
    assert len(told(now)) == 2


def test_it_moves_when_anything_was_written_delivered_or_published_or_is_trained():
    assert not diagnose(STATUS, STATUS).is_moving
    later = (
        replace(STATUS, tokens_received=1),
        replace(STATUS, published=4),
        replace(STATUS, rounds=(replace(ROUND, groups_delivered=3),)),
        replace(STATUS, rounds=()),
        replace(STATUS, trainer_does="trains"),
    )
    assert all(diagnose(STATUS, one).is_moving for one in later)
