"""The display of a training run, on a real manager: it says who is there, and a manager that is gone ends nothing."""

import asyncio
import io
import re
from pathlib import Path

from rich.console import Console
from tests.integration.live import CONFIG, PATIENCE_S, honest_worker, manager, play_round, run, trainer

from polyrl.run.display import Display, Told, view_of
from polyrl.telemetry.progress import Progress
from polyrl.wire.control import RoundStatus, Status, WaitStatus, WorkerStatus
from polyrl.wire.dial import Dialer

WORKER = WorkerStatus(
    name="w0",
    state="active",
    connected=True,
    engine="emulated",
    model="",
    version=3,
    running=0,
    slots=4,
    engine_waiting=0,
    kv_used=0.0,
    tokens_per_s=100.0,
    price_usd_per_hour=1.0,
    spot=True,
    last_heard_s=0.1,
    usd=0.0,
)


def a_status(**changes):
    fields = {
        "run": "open",
        "paused": False,
        "uptime_s": 5.0,
        "now_s": 5.0,
        "published": 3,
        "trainer": "attached",
        "workers": (WORKER,),
        "rounds": (),
        "queues": {},
        "waits": (),
        "ledger": {},
        "refused": {},
    }
    return Status(**{**fields, **changes})


def worker(**changes):
    import msgspec

    return msgspec.structs.replace(WORKER, **changes)


def test_before_the_manager_has_answered_the_loop_is_shown():
    view = view_of(None, Told("arithmetic", 40, step=2, rewards=[0.5]))
    assert (view.name, view.step, view.num_steps, view.rewards, view.workers) == ("arithmetic", 2, 40, (0.5,), ())


def test_workers_are_shown_by_what_they_do():
    workers = (
        worker(running=3),
        worker(),
        worker(name="trainer", local=True),
        worker(name="trainer-1", local=True),
        worker(state="waiting", version=-1),
        worker(state="joined"),
        worker(state="draining"),
        worker(connected=False, last_heard_s=7.4),
    )
    view = view_of(a_status(workers=workers), Told("r", 1))
    states = [one.state for one in view.workers]
    assert states == ["generating", "idle", "training", "training", "pulling", "starting", "draining", "silent 7 s"]
    assert (view.workers[0].tok_s, view.workers[1].tok_s) == (100.0, 0.0)
    assert view.workers[4].version is None
    assert [one.name for one in view.workers if one.local] == ["trainer", "trainer-1"]


def test_the_round_of_the_step_is_shown_and_no_other():
    rounds = tuple(
        RoundStatus(
            step=step,
            kind="long",
            age_s=1.0,
            groups=16,
            samples_waiting=0,
            samples_running=0,
            samples_generated=99,
            groups_generated=12,
            groups_delivered=9,
            closed=False,
        )
        for step in (4, 5)
    )
    view = view_of(a_status(rounds=rounds), Told("r", 9, step=5, num_trained=4))
    assert (view.kind, view.num_groups, view.num_generated, view.num_scored, view.num_trained) == ("long", 16, 12, 9, 4)
    assert view_of(a_status(rounds=rounds), Told("r", 9, step=6)).num_groups == 0


def test_heartbeats_are_no_waits_to_speak_of():
    waits = (
        WaitStatus(what="heartbeat", of="w0", age_s=None, given_up_in_s=1.0),
        WaitStatus(what="workers", of="round 4", age_s=3.21, given_up_in_s=None),
        WaitStatus(what="hand_over", of="lease 7", age_s=None, given_up_in_s=9.7),
    )
    view = view_of(a_status(waits=waits), Told("r", 1))
    assert view.waits == ["for workers: round 4, 3.2 s so far", "for hand over: lease 7, 10 s more"]


async def watched(run_dir: Path, text: io.StringIO) -> None:
    progress = Progress(Console(file=text, width=100, force_terminal=True, color_system=None))
    async with manager(run_dir) as live, honest_worker(live), trainer(live) as fleet:
        display = Display("arithmetic", 1, Dialer(live.url, live.token("admin")), progress=progress)
        async with display, asyncio.timeout(PATIENCE_S):
            display.step_begins(0)
            await fleet.publish(0)
            await play_round(fleet, 0)
            while "honest" not in text.getvalue():  # drawn by its own thread, from the manager's answer
                await asyncio.sleep(0.02)
            display.step_ended(0, {"reward/mean": 0.5, "cost/usd_total": 1.25})


def test_a_terminal_shows_the_fleet_and_keeps_the_line_of_the_step(tmp_path):
    text = io.StringIO()
    run(watched(tmp_path, text))
    assert "arithmetic   step 0 of 1" in text.getvalue()
    assert "1 remote; " in text.getvalue()
    assert "step    0  reward    0.5  usd   1.25" in text.getvalue()


async def followed(run_dir: Path, text: io.StringIO) -> None:
    progress = Progress(Console(file=text, width=80, force_terminal=True, color_system=None))
    async with manager(run_dir) as live, trainer(live) as fleet:
        await fleet.publish(0)
        asked = asyncio.create_task(play_round(fleet, 0))  # which nobody writes
        async with asyncio.timeout(PATIENCE_S):
            async with Dialer(live.url, live.token("admin")) as dialer:
                while not any(one.age_s >= 1.0 for one in (await dialer.get("/v1/status", Status)).rounds):
                    await asyncio.sleep(0.05)
            dialer = Dialer(live.url, live.token("admin"))
            async with Display("arithmetic", 1, dialer, progress=progress, follows=True):
                while "waits for groups" not in text.getvalue():
                    await asyncio.sleep(0.02)
        asked.cancel()


def test_who_only_looks_sees_what_the_trainer_does_and_how_old_the_round_is(tmp_path):
    text = io.StringIO()
    run(followed(tmp_path, text))
    ages = [float(one) for one in re.findall(r"of 2 groups  (\d+\.\d) s", text.getvalue())]
    assert ages and min(ages) >= 0.9, "since it was opened, not since somebody looks"


async def unanswered(text: io.StringIO) -> None:
    progress = Progress(Console(file=text, width=100, force_terminal=True, color_system=None))
    async with Display("r", 1, Dialer("http://127.0.0.1:9", "token"), progress=progress) as display:
        display.step_begins(0)
        async with asyncio.timeout(PATIENCE_S):
            while "the manager does not answer" not in text.getvalue():
                await asyncio.sleep(0.02)


def test_a_manager_that_does_not_answer_is_a_line_of_the_display():
    run(unanswered(io.StringIO()))


async def without_a_terminal(text: io.StringIO) -> None:
    progress = Progress(Console(file=text, width=100))
    async with Display("r", 1, Dialer("http://127.0.0.1:9", "token"), progress=progress) as display:
        display.step_begins(0)
        display.groups_trained(CONFIG.domains[0].prompts_per_step)
        display.step_ended(0, {"reward/mean": 0.5})


def test_without_a_terminal_nobody_is_asked_and_there_is_one_line():
    text = io.StringIO()
    run(without_a_terminal(text))
    assert text.getvalue() == "step    0  reward    0.5\n"


def test_steps_that_are_over_already_take_the_time_that_their_metrics_tell():
    """`polyrl top` begins with steps of the past: no step began while it looked."""
    text = io.StringIO()
    progress = Progress(Console(file=text, width=100, force_terminal=True, color_system=None))
    display = Display("arithmetic", 10, Dialer("http://127.0.0.1:1", "none"), progress=progress)
    with progress:
        for step in range(5):
            display.step_ended(step, {"time/step_total": 2.0, "reward/mean": 0.5})
        display.step_begins(5)
    left_s = [float(one) for one in re.findall(r"([0-9.]+) s left", text.getvalue())]
    assert left_s and all(0.0 <= one <= 10.0 for one in left_s)
