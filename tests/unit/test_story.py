"""A sample's story: what happened, why, and where its time went."""

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.properties.hostile import play

from polyrl.ids import GroupId, Incarnation, SampleId, Step, Version, WorkerName, parse_sample, sample_id
from polyrl.journal.records import Journal, JournalHeader, Record
from polyrl.journal.story import UnknownSample, tell_story
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.desk import RULES
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig, SeedingConfig
from polyrl.scheduling.rules.reward_budgets import RewardConfig
from polyrl.scheduling.scheduler import Scheduler

W1, W2 = WorkerName("w1"), WorkerName("w2")
LIFE = Incarnation(1)


class Run:
    """A scheduler, and what it was told."""

    def __init__(self, **config) -> None:
        self.config = SchedulerConfig(
            domains=(DomainData(name="math", prompts_per_step=1, num_prompts=10),),
            max_new_tokens=100,
            rounds=RoundsConfig(samples_per_prompt=2, refill=False),
            seeding=SeedingConfig(mode="off"),
            **config,
        )
        self.scheduler = Scheduler(self.config)
        self.history: list[tuple[float, e.Event]] = []
        self.leases: dict[SampleId, c.Generate] = {}
        self.attempts: dict[SampleId, int] = {}

    def tell(self, now: float, event: e.Event) -> list[c.Command]:
        self.history.append((now, event))
        commands = self.scheduler.handle(event, now)
        for command in commands:
            if isinstance(command, c.Generate):
                self.leases[command.sample] = command
            elif isinstance(command, c.Score):
                self.attempts[command.sample] = command.attempt
        return commands

    def join(self, now: float, worker: WorkerName, slots: int = 2) -> None:
        self.tell(now, e.WorkerJoined(worker, LIFE, slots=slots, version=Version(0)))

    def open(self, now: float) -> None:
        self.tell(now, e.VersionPublished(Version(0)))
        self.tell(now, e.RoundRequested(Step(0)))

    def progress(self, now: float, sample: str, num_tokens: int) -> None:
        lease = self.leases[parse_sample(sample)]
        self.tell(now, e.TokensArrived(lease.worker, LIFE, (lease.lease,), (num_tokens,)))

    def finish(self, now: float, sample: str, num_tokens: int) -> None:
        self.tell(now, e.SampleFinished(self.leases[parse_sample(sample)].lease, num_tokens))

    def reward(self, now: float, sample: str, outcome: e.RewardOutcome = "scored", *, correct: bool = True) -> None:
        key = parse_sample(sample)
        self.tell(now, e.RewardFinished(key, self.attempts[key], outcome, correct, 0.5))

    def train(self, now: float) -> None:
        self.tell(now, e.GroupsTaken(Step(0), (GroupId(1),)))
        self.tell(now + 1.0, e.MicroBatchTrained(Step(0)))
        self.tell(now + 2.0, e.StepTrained(Step(0)))

    def story(self, sample: str) -> list[str]:
        return tell_story([journal(self.config, self.history)], parse_sample(sample))


def journal(config: SchedulerConfig, history: list[tuple[float, e.Event]]) -> Journal:
    records = [Record(number, 0, now, event, b"", b"") for number, (now, event) in enumerate(history, 1)]
    return JournalHeader(config, rules=RULES), records


def sums(story: list[str]) -> dict[str, float]:
    """The closing part: seconds by phase, and in all."""
    (first,) = (number for number, line in enumerate(story) if " s until " in line)
    total, *parts = story[first:]
    found = {"total": float(total.split()[0])}
    for line in parts:
        seconds, phase = re.fullmatch(r" *([\d.]+) s +\d+%  ([a-z ]+?)(?:  .*)?", line).groups()  # type: ignore[union-attr]
        found[phase] = float(seconds)
    return found


def a_life_with_a_loss() -> Run:
    run = Run()
    run.open(10.0)
    run.join(12.0, W1)
    run.progress(15.0, "1/0", 30)
    run.tell(15.5, e.WorkerReported(W1, LIFE))
    run.tell(17.0, e.WorkerLeft(W1, LIFE, "preempted"))
    run.join(20.0, W2)
    run.finish(24.0, "1/0", 80)
    run.reward(25.0, "1/0")
    run.finish(29.0, "1/1", 90)
    run.reward(31.0, "1/1")
    run.train(36.0)
    return run


def test_a_lost_worker_a_resumption_and_the_trainer_are_told_in_order_with_their_reasons():
    assert a_life_with_a_loss().story("1/0") == [
        "sample 1/0: prompt 6 of math, epoch 0, one of 2; round 0 (short) opened at 10.0 s",
        "      +0.0 s  opened in round 0 (short): what the step needs",
        "      +2.0 s  started on w1 (least loaded), after 2.0 s of waiting",
        "      +7.0 s  lost: w1 is gone (preempted), silent for 2.0 s, at token 30 (30 tokens in 5.0 s)",
        "     +10.0 s  resumed at token 30 on w2 (least loaded), after 3.0 s of waiting",
        "     +14.0 s  finished on w2 at token 80 (50 tokens in 4.0 s)",
        "     +14.0 s  scoring attempt 1 began: at most 30.0 s of CPU time (no correct run of this case yet)",
        "     +15.0 s  scoring attempt 1: scored, correct, with 0.5 s of CPU time",
        "     +21.0 s  its group was delivered to the trainer: all its samples are scored",
        "     +26.0 s  its group was taken into a micro-batch of step 0",
        "     +28.0 s  trained in step 0",
        "28.0 s until it was trained in step 0:",
        "       9.0 s   32%  generating  80 tokens, 2 leases",
        "       6.0 s   21%  waiting for its siblings",
        "       5.0 s   18%  waiting for a worker",
        "       5.0 s   18%  waiting for the trainer",
        "       2.0 s    7%  in training",
        "       1.0 s    4%  scoring  1 attempt",
    ]


def test_where_nobody_says_what_is_correct_the_story_does_not_either():
    run = Run(rewards=RewardConfig(adaptive=False, t_max_s=600.0))
    run.open(0.0)
    run.join(0.0, W1)
    run.finish(4.0, "1/0", 80)
    run.reward(5.0, "1/0", correct=False)
    told = [
        line.partition("  ")[2].strip() for line in (one.strip() for one in run.story("1/0")) if "attempt 1" in line
    ]
    assert told == ["scoring attempt 1 began", "scoring attempt 1: scored"]


def test_a_missed_heartbeat_is_the_reason_when_it_was():
    run = Run()
    run.open(0.0)
    run.join(0.0, W1)
    run.tell(3.0, e.TimePassed())
    assert any("lost: w1 was given up (no heartbeat)" in line for line in run.story("1/1"))


def test_a_drain_says_who_asked_and_where_it_stopped():
    run = Run()
    run.open(0.0)
    run.join(0.0, W1)
    run.tell(1.0, e.DrainRequested(W1, LIFE, "a spot notice"))
    run.tell(1.5, e.LeaseEnded(run.leases[parse_sample("1/0")].lease, 12, "handed_over"))
    told = "\n".join(run.story("1/0"))
    assert "+1.0 s  asked back from w1: a spot notice" in told
    assert "+1.5 s  handed over by w1 at token 12 (12 tokens in 1.5 s)" in told
    assert "the journal ends; it is waiting for a worker for 0.0 s" in told


def test_a_hand_over_that_nobody_answers_is_told():
    run = Run(fleet_rules=FleetRules(heartbeat_timeout_s=60.0, drain_timeout_s=60.0))
    run.open(0.0)
    run.join(0.0, W1)
    run.tell(1.0, e.DrainRequested(W1, LIFE, "a spot notice"))
    run.tell(11.0, e.TimePassed())
    assert any("stopped on w1: it was not handed over in time" in line for line in run.story("1/0"))


def test_tokens_that_are_thrown_away_are_told():
    run = Run(fleet_rules=FleetRules(migrate=False))
    run.open(0.0)
    run.join(0.0, W1)
    run.progress(1.0, "1/0", 7)
    run.tell(2.0, e.WorkerLeft(W1, LIFE, "died"))
    assert any("its 7 tokens are thrown away: fleet_rules.migrate is off" in line for line in run.story("1/0"))


def test_a_reward_that_fails_is_tried_again_and_then_ends_the_sample_with_that_reason():
    run = Run()
    run.open(0.0)
    run.join(0.0, W1)
    run.finish(5.0, "1/0", 9)
    for attempt in range(3):
        run.reward(6.0 + attempt, "1/0", "infrastructure_failed")
    story = run.story("1/0")
    assert sum("scoring attempt" in line and "began" in line for line in story) == 3
    assert story[-5].endswith("discarded: its reward could not be had")
    assert sums(story) == {"total": 8.0, "generating": 5.0, "scoring": 3.0, "waiting for a worker": 0.0}


def test_a_rejected_group_gives_the_trainers_reason():
    run = Run()
    run.open(0.0)
    run.join(0.0, W1)
    run.finish(5.0, "1/0", 9)
    run.finish(5.0, "1/1", 9)
    run.reward(6.0, "1/0")
    run.reward(6.0, "1/1")
    run.tell(7.0, e.GroupRejected(GroupId(1), "all rewards are equal"))
    assert any(line.endswith("+7.0 s  discarded: all rewards are equal") for line in run.story("1/1"))


def test_a_sample_that_has_no_reward_as_part_of_its_group_gives_the_trainers_reason():
    run = Run()
    run.open(0.0)
    run.join(0.0, W1)
    run.finish(5.0, "1/0", 9)
    run.finish(5.0, "1/1", 9)
    run.reward(6.0, "1/0")
    run.reward(6.0, "1/1")
    run.tell(7.0, e.GroupUnscored(GroupId(1), (sample_id(GroupId(1), 1),), "the judge is away"))
    assert any(line.endswith("+7.0 s  discarded: the judge is away") for line in run.story("1/1"))
    assert not any("discarded" in line for line in run.story("1/0"))


def test_a_sample_that_was_not_needed_says_so():
    run = Run()
    run.config = SchedulerConfig(
        domains=run.config.domains,
        rounds=RoundsConfig(tail_batching="race", samples_per_prompt=1, prompt_factor=1.0, sample_factor=2.0),
    )
    run.scheduler = Scheduler(run.config)
    run.open(0.0)
    run.join(0.0, W1)
    run.finish(5.0, "1/0", 9)
    told = run.story("1/1")
    assert any("stopped on w1: its group has enough answers; at token 0" in line for line in told)
    assert any("discarded: its group has enough answers" in line for line in told)


def test_an_unknown_sample_is_answered_with_those_there_are():
    run = a_life_with_a_loss()
    with pytest.raises(UnknownSample, match="no sample 9/0: this journal has groups 1 to 1"):
        run.story("9/0")
    with pytest.raises(UnknownSample, match="no sample 1/2: group 1 has samples 1/0 to 1/1"):
        run.story("1/2")
    with pytest.raises(UnknownSample, match="no round was opened"):
        tell_story([journal(run.config, [])], sample_id(GroupId(1), 0))


@given(st.integers(0, 200))
@settings(max_examples=15)
def test_in_any_history_the_phases_of_a_life_add_up_and_its_lines_are_in_order(seed):
    world = play(seed, num_events=120)
    history = [(now, event) for now, event, _ in world.log]
    for sample in list(world.lengths)[::7]:
        story = tell_story([journal(world.config, history)], sample)
        found = sums(story)
        total = found.pop("total")
        assert sum(found.values()) == pytest.approx(total, abs=0.05 * len(found) + 0.06)
        moments = [float(line.split()[0]) for line in story if re.match(r" *\+", line)]
        assert moments == sorted(moments)
        assert moments[-1] == total
