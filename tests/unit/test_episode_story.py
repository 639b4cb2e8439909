"""An episode's story: its hosts, its calls, and why it ended, in plain lines."""

import re

import pytest
from tests.properties.hosts import EpisodeWorld
from tests.unit.agents import TROUBLE, write_agents
from tests.unit.test_story import journal, sums

from polyrl.cli.main import main
from polyrl.ids import GroupId, HostName, Incarnation, SampleId, Step, Version, WorkerName, sample_id
from polyrl.journal.story import tell_story
from polyrl.scheduling.core import commands as c
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import (
    DomainData,
    EnvironmentRules,
    FleetRules,
    RoundsConfig,
    SchedulerConfig,
    SeedingConfig,
)
from polyrl.scheduling.scheduler import Scheduler

ONE, LIFE, W1 = sample_id(GroupId(1), 0), Incarnation(1), WorkerName("w1")


class EpisodeRun:
    """A scheduler with three episodes, and what it was told."""

    def __init__(self, **rules) -> None:
        self.config = SchedulerConfig(
            domains=(DomainData(name="maze", prompts_per_step=1, num_prompts=10, environment="maze"),),
            max_new_tokens=100,
            rounds=RoundsConfig(samples_per_prompt=3, refill=False),
            seeding=SeedingConfig(mode="off"),
            fleet_rules=FleetRules(heartbeat_timeout_s=1000.0),
            environments=EnvironmentRules(**rules),
        )
        self.scheduler = Scheduler(self.config)
        self.history: list[tuple[float, e.Event]] = []
        self.leases: dict[SampleId, c.Generate] = {}
        self.tell(0.0, e.VersionPublished(Version(0)))
        self.tell(0.0, e.RoundRequested(Step(0)))
        self.tell(0.0, e.WorkerJoined(W1, LIFE, slots=2, version=Version(0)))

    def tell(self, now: float, event: e.Event) -> None:
        self.history.append((now, event))
        for command in self.scheduler.handle(event, now):
            if isinstance(command, c.Generate):
                self.leases[command.sample] = command

    def join(self, now: float, host: str) -> None:
        self.tell(now, e.HostJoined(HostName(host), LIFE, "maze", 3))

    def call(self, now: float, start: int, *, attempt: int = 1, held: int | None = None) -> None:
        self.tell(now, e.CallMade(ONE, attempt, start, start if held is None else held, 100))

    def answer(self, now: float, num_tokens: int) -> None:
        self.tell(now, e.SampleFinished(self.leases[ONE].lease, num_tokens))

    def story(self) -> list[str]:
        return tell_story([journal(self.config, self.history)], ONE)


def test_hosts_calls_a_loss_and_the_end_are_told_in_order():
    run = EpisodeRun()
    run.join(3.0, "h1")
    run.call(4.0, 0)
    run.answer(6.0, 20)
    run.call(9.0, 20)
    run.tell(10.0, e.TokensArrived(W1, LIFE, (run.leases[ONE].lease,), (25,)))
    run.tell(11.0, e.HostLeft(HostName("h1"), LIFE, "its process died"))
    run.join(15.0, "h2")
    run.call(18.0, 20, attempt=2, held=25)
    run.answer(19.0, 40)
    run.tell(20.0, e.EpisodeEnded(ONE, 2, "scored", 40))
    assert run.story() == [
        "sample 1/0: prompt 6 of maze, epoch 0, one of 3; round 0 (short) opened at 0.0 s",
        "      +0.0 s  opened in round 0 (short): what the step needs",
        "      +3.0 s  begun by h1 (a host has room), after 3.0 s of waiting",
        "      +4.0 s  call 1 made by h1, after 0 tokens",
        "      +4.0 s  call 1 given to w1 (least loaded), after 0.0 s of waiting",
        "      +6.0 s  call 1 answered by w1 at token 20 (20 tokens in 2.0 s)",
        "      +9.0 s  call 2 made by h1, after 20 tokens",
        "      +9.0 s  call 2 given to w1 (it answered the last call), after 0.0 s of waiting",
        "     +11.0 s  stopped on w1: its process died; at token 25 (5 tokens in 2.0 s)",
        "     +11.0 s  its host h1 is gone (its process died): it is to be begun again, 25 tokens of it are kept",
        "     +15.0 s  begun again by h2 (attempt 2), after 4.0 s of waiting",
        "     +18.0 s  call 2 made by h2, after 20 tokens, 5 of its answer are there",
        "     +18.0 s  call 2 resumed at token 25 on w1 (with its siblings), after 0.0 s of waiting",
        "     +19.0 s  call 2 answered by w1 at token 40 (15 tokens in 1.0 s)",
        "     +20.0 s  ended by its environment at h2: scored, 2 calls, 40 tokens",
        "     +20.0 s  the journal ends; it is waiting for its siblings for 0.0 s",
        "20.0 s until the journal ends:",
        "       8.0 s   40%  with its environment  2 calls, 2 attempts",
        "       7.0 s   35%  waiting for a host",
        "       5.0 s   25%  generating  40 tokens, 3 leases",
        "       0.0 s    0%  waiting for a worker",
        "       0.0 s    0%  waiting for its siblings",
    ]


def test_an_environment_that_took_another_way_is_told_with_what_that_cost():
    run = EpisodeRun()
    run.join(0.0, "h1")
    run.call(1.0, 0)
    run.answer(2.0, 30)
    run.call(3.0, 30)
    run.answer(4.0, 50)
    run.call(5.0, 0)
    told = "\n".join(run.story())
    assert "call 1 made by h1, after 0 tokens; it took another way: 50 tokens are thrown away" in told


def test_an_episode_over_time_says_so_and_with_what_it_is_scored():
    run = EpisodeRun(turn_timeout_s=30.0)
    run.join(0.0, "h1")
    run.call(1.0, 0)
    run.answer(2.0, 30)
    run.tell(20.0, e.CallMade(sample_id(GroupId(1), 1), 1, 0, 0, 100))  # its host does not hang
    run.tell(32.0, e.TimePassed())
    told = "\n".join(run.story())
    assert "+32.0 s  stopped at h1: its environment's move took too long (over 30.0 s); it is scored with" in told
    assert "scored with 30 tokens" in told


@pytest.mark.parametrize(
    ("outcome", "words"),
    [("failed", "discarded: its environment failed too often"), ("scored", "waiting for its siblings")],
)
def test_the_end_of_an_episode_is_its_environments(outcome, words):
    run = EpisodeRun(max_attempts=1)
    run.join(0.0, "h1")
    run.call(1.0, 0)
    run.answer(2.0, 30)
    run.tell(3.0, e.EpisodeEnded(ONE, 1, outcome, 30))
    told = "\n".join(run.story())
    assert f"ended by its environment at h1: {outcome}, 1 call, 30 tokens" in told
    assert words in told


@pytest.mark.parametrize("seed", range(8))
def test_in_any_history_of_hosts_the_phases_of_an_episode_add_up(seed):
    world = EpisodeWorld(seed)
    world.play(120)
    history = [(now, event) for now, event, _ in world.log]
    for sample in list(world.drawn)[::5]:
        story = tell_story([journal(world.config, history)], sample)
        found = sums(story)
        total = found.pop("total")
        assert sum(found.values()) == pytest.approx(total, abs=0.05 * len(found) + 0.06)
        moments = [float(line.split()[0]) for line in story if re.match(r" *\+", line)]
        assert moments == sorted(moments)


def test_a_simulated_run_with_environments_replays_and_tells(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    out = str(tmp_path / "out")
    assert main(["simulate", str(write_agents(tmp_path)), *TROUBLE, "--out", out, "--no-progress"]) == 0
    text = capsys.readouterr().out
    for words in ("episodes", "waiting for a host", "engines busy", "lost to waiting", "prefix reuse", "hosts $"):
        assert words in text
    assert main(["replay", out]) == 0
    assert "same commands" in capsys.readouterr().out
    assert main(["story", out, "1/0"]) == 0
    assert "begun by tools-1 (a host has room)" in capsys.readouterr().out
