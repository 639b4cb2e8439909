"""What the doctor says of a live fleet is true, whoever it waits for; and what it says of a run that nobody runs."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs
from tests.integration.live import (
    CONFIG,
    ENGINE,
    Live,
    honest_worker,
    manager,
    manager_in_thread,
    play_round,
    run,
    trainer,
    until,
)

from polyrl.cli import doctor
from polyrl.cli.main import main
from polyrl.client import Fleet, Sample
from polyrl.config.recipe_files import load_recipe
from polyrl.journal.files import EVENTS, FILE_NAME, LIVE_FOLDER
from polyrl.manager import status
from polyrl.run.checkpoints import write_recipe
from polyrl.run.diagnosis import diagnose, diagnose_stopped
from polyrl.run.findings import Diagnosis
from polyrl.scheduling.core import events as e
from polyrl.scheduling.core.parameters import FleetRules
from polyrl.telemetry import last_steps
from polyrl.trainer.state import checkpoint
from polyrl.wire.control import Status

SLOW = structs.replace(ENGINE, slots=2, tokens_per_s=5.0, median_tokens=1000.0)
"""No answer ends while the doctor looks."""


def ask(live: Live) -> Status:
    return status.status(live.service.lobby, live.service.uptime_s)


async def examined(live: Live, after_s: float = 0.0) -> Diagnosis:
    earlier = ask(live)
    await asyncio.sleep(after_s)
    return diagnose(earlier, ask(live), "runs/x")


@asynccontextmanager
async def a_round(fleet: Fleet) -> AsyncIterator[None]:
    """One that is played while the doctor looks."""
    await fleet.publish(0)
    playing = asyncio.create_task(play_round(fleet, 0))
    try:
        yield
    finally:
        playing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await playing


def test_a_manager_without_a_trainer(tmp_path: Path):
    async def scenario():
        async with manager(tmp_path) as live, honest_worker(live):
            found = await examined(live)
            assert found.findings[0].what.startswith("no trainer has opened a run since the manager started")
            assert "and 1 worker with it" in found.findings[0].then
            assert found.needs_help and not found.is_moving

    run(scenario())


def test_samples_without_a_worker_wait_for_one_and_go_on_when_it_comes(tmp_path: Path):
    async def scenario():
        async with manager(tmp_path) as live, trainer(live) as fleet, a_round(fleet):
            await until(
                lambda: ask(live).queues.get("groups_without_prompt") == 0 < len(ask(live).rounds), "it is open"
            )
            found = await examined(live)
            assert found.findings[0].what.endswith("8 samples wait, and there is no worker")
            assert "step 0 lacks 2 groups of 2" in found.findings[0].what
            assert found.needs_help and not found.is_moving
            async with honest_worker(live, SLOW):
                await until(lambda: bool(ask(live).tokens_received), "it writes")
                found = await examined(live, 0.3)
                assert found.is_moving and not found.needs_help
                assert "2 samples run on 1 worker" in found.findings[0].what
                assert "6 more wait for a place there" in found.findings[0].what

    run(scenario())


def test_the_last_samples_of_a_round_are_named_with_the_longest(tmp_path: Path):
    async def scenario():
        slow = structs.replace(SLOW, slots=8)
        async with manager(tmp_path) as live, honest_worker(live, slow), trainer(live) as fleet, a_round(fleet):
            await until(lambda: any(one.longest_tokens > 3 for one in ask(live).rounds), "it writes")
            earlier = ask(live)
            await until(lambda: ask(live).tokens_received > earlier.tokens_received, "it writes more")
            now = ask(live)
            [main] = diagnose(earlier, now).findings
            assert f"the longest has {now.rounds[0].longest_tokens} tokens, on honest" in main.what
            assert f"the last {now.rounds[0].samples_running} samples run, and none waits" in main.what
            assert "64 tokens are allowed" in main.then and "rounds.tail_batching" in main.do

    run(scenario())


def test_a_worker_that_hangs_is_named(tmp_path: Path):
    async def scenario():
        hangs = structs.replace(SLOW, slots=8, tokens_per_s=0.001)
        async with manager(tmp_path) as live, honest_worker(live, hangs), trainer(live) as fleet, a_round(fleet):
            await until(lambda: any(one.running == 8 for one in ask(live).workers), "it has them")
            found = await examined(live, 0.2)
            assert [one.what for one in found.findings[1:]] == [
                "honest has 8 samples and wrote nothing while it was looked at"
            ]
            assert found.findings[1].then.startswith("the manager looks in ")
            assert not found.is_moving

    run(scenario())


def test_answers_that_wait_for_their_reward(tmp_path: Path):
    async def scenario():
        may_score = asyncio.Event()

        async def reward(_: Sample) -> float:
            await may_score.wait()
            return 1.0

        async with (
            manager(tmp_path) as live,
            honest_worker(live),
            trainer(live, reward=reward) as fleet,
            a_round(fleet),
        ):
            await until(lambda: ask(live).queues.get("rewards_running", 0) == 8, "all are scored at once")
            [main] = (await examined(live)).findings
            assert main.what.endswith("8 answers are being scored, 0 wait for it")
            assert "one that is not answered is given up in" in main.then
            may_score.set()
            await until(lambda: not ask(live).rounds, "the step is done")
            [main] = (await examined(live)).findings
            assert main.what.startswith("the trainer has no round open")

    run(scenario())


def test_a_pause_a_trainer_that_goes_and_a_worker_that_goes(tmp_path: Path):
    config = structs.replace(CONFIG, fleet_rules=FleetRules(heartbeat_timeout_s=20.0))

    async def scenario():
        async with manager(tmp_path) as live:
            async with trainer(live, config) as fleet, a_round(fleet), honest_worker(live, SLOW):
                await until(lambda: bool(ask(live).tokens_received), "it writes")
                live.service.post(lambda lobby: lobby.tell(e.PlacingPaused()))
                await until(lambda: ask(live).paused, "it is paused")
                found = await examined(live)
                assert found.findings[0].what == "the run is paused"
                live.service.post(lambda lobby: lobby.tell(e.PlacingResumed()))
                await until(lambda: not ask(live).paused, "it goes on")
                for one in live.service.lobby.workers.values():
                    assert one.link is not None
                    one.link.close("cut", code=1001)
                await until(lambda: not any(one.connected for one in ask(live).workers), "it is cut off")
                found = diagnose(ask(live), ask(live))
                [away] = [one for one in found.findings if one.what.startswith("honest is away")]
                assert "it is given up, and what it ran (2 samples) goes on elsewhere" in away.then
            await until(lambda: ask(live).trainer != "attached", "the trainer is gone")
            found = await examined(live)
            assert found.findings[0].what.startswith("the trainer is away, for ")
            assert found.findings[0].do.endswith("polyrl train --resume runs/x")
            assert found.needs_help

    run(scenario())


def test_the_command_says_it_in_text_and_in_json(tmp_path: Path, capsys, monkeypatch):
    monkeypatch.setattr(doctor, "_APART_S", 0.01)
    with manager_in_thread(tmp_path) as live:
        where = ["doctor", "--manager", live.url, "--token-file", str(tmp_path / "admin.token")]
        assert main(where) == 1
        out = capsys.readouterr().out
        assert out.startswith("no trainer has opened a run") and "\n    next: the manager waits" in out
        assert "nothing moved while it was looked at" in out
        assert main([*where, "--json"]) == 1
        tree = json.loads(capsys.readouterr().out)
        assert (tree["running"], tree["moving"], tree["needs_help"]) == (True, False, True)
        assert [set(one) for one in tree["findings"]] == [{"what", "then", "do", "needs_help", "stalls"}]
    assert main(where) == 2
    assert "if the run was killed: polyrl train --resume RUN_DIR" in capsys.readouterr().err


def test_a_manager_whose_process_is_stopped_is_named_at_once(tmp_path: Path, capsys):
    words = [sys.executable, "-m", "polyrl", "manager", "--run-dir", str(tmp_path), "--port", "0"]
    with subprocess.Popen(words, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None and "manager:" in process.stdout.readline()
            process.send_signal(signal.SIGSTOP)
            os.waitid(os.P_PID, process.pid, os.WSTOPPED)
            assert main(["doctor", str(tmp_path)]) == 1
            assert f"let it go on: kill -CONT {process.pid}" in capsys.readouterr().out
        finally:
            process.kill()
    assert diagnose_stopped(tmp_path) is None


def step(**metrics: float) -> dict[str, Any]:
    named = {name.replace("__", "/"): value for name, value in metrics.items()}
    return {"step": 0, "time/step_total": 10.0, "idle/trainer_share": 0.0, "idle/fleet_share": 0.0, **named}


@pytest.mark.parametrize(
    ("trained", "told", "code"),
    [
        (0, "it does not run: 0 of 3 steps are trained", 1),
        (2, "it does not run: 2 of 3 steps are trained", 1),
        (3, "the run is done: all 3 steps are trained", 0),
    ],
)
def test_a_run_that_nobody_runs(tmp_path: Path, capsys, trained: int, told: str, code: int):
    (tmp_path / "journal").mkdir()
    (tmp_path / "recipe.toml").write_text("[train]\nsteps = 3\n")
    lines = [json.dumps({**step(), "step": number}) + "\n" for number in range(trained)]
    (tmp_path / "metrics.jsonl").write_text("".join(lines))
    assert main(["doctor", str(tmp_path)]) == code
    out = capsys.readouterr().out
    assert out.startswith(told) and "next:" not in out
    assert ("polyrl train --resume" in out) == bool(code)
    assert ("medians: 10.0 s" in out) == (trained > 1)


@pytest.mark.parametrize(
    ("recipe", "why"),
    [
        ("[train]\nsteps = 9\nstop_at_reward = 0.5\n", "the mean reward has reached 0.5, after 2 steps"),
        ("[train]\nsteps = 9\n[data]\nnum_epochs = 1\n", "the data has ended, after 2 steps"),
    ],
)
def test_a_run_that_ended_before_its_last_step_is_done_too(tmp_path: Path, capsys, recipe: str, why: str):
    (tmp_path / "journal").mkdir()
    (tmp_path / "checkpoints").mkdir()
    checkpoint.note_data_ended(tmp_path, 2)
    (tmp_path / "recipe.toml").write_text(recipe)
    lines = [json.dumps({**step(reward__mean=reward), "step": number}) for number, reward in enumerate((0.1, 0.6))]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["doctor", str(tmp_path)]) == 0
    assert capsys.readouterr().out.startswith(f"the run is done: {why}")


def test_a_run_that_kept_no_checkpoint_is_not_gone_on_with(tmp_path: Path, capsys):
    (tmp_path / "journal").mkdir()
    (tmp_path / "recipe.toml").write_text("[train]\nsteps = 3\n[checkpoint]\nenabled = false\n")
    assert main(["doctor", str(tmp_path)]) == 1
    out = capsys.readouterr().out
    assert "begin anew" in out and "--resume" not in out


def test_where_there_is_no_run_is_one_line(tmp_path: Path, capsys):
    assert main(["doctor", str(tmp_path)]) == 2
    assert "no run there; expected a directory with a journal" in capsys.readouterr().err
    assert main(["doctor"]) == 2
    assert "expected RUN, the directory of a run, or --manager URL" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("metrics", "waits_for", "words"),
    [
        (
            {"idle__trainer_share": 0.7, "idle__fleet_share": 0.1, "fleet__useful": 3},
            "answers",
            "long: more workers (the sched",
        ),
        (
            {"idle__trainer_share": 0.7, "fleet__useful": 2, "fleet__workers": 2},
            "last answers",
            "long: rounds.tail_batching",
        ),
        ({"idle__trainer_share": 0.1, "idle__fleet_share": 0.5}, "", "training is what takes long"),
        ({"time__step_publish": 2.0}, None, "publishing takes 20% of a step"),
        (
            {"seeding__t_seed_s": 8.0, "fleet__useful": 2, "idle__fleet_share": 0.4},
            None,
            "devices write for 80% of a step before they train: remote wo",
        ),
        (
            {"time__step_total": 0.5, "seeding__t_seed_s": 0.2, "tokens__kept": 1900},
            None,
            "no worker would help, since it needs about 0.5 s a step to begin, and they write 1,900 tokens in 0.2 s",
        ),
    ],
)
def test_advice_follows_from_what_took_long(metrics: dict[str, float], waits_for: str | None, words: str):
    [*_, advice] = last_steps.tell([step(), step(**metrics), step(**metrics)], waits_for)
    assert words in advice
    assert len(last_steps.tell([step()])) == 2
    assert last_steps.tell([]) == []


@pytest.mark.parametrize("waits_for", [None, "rewards", "environments", "updates"])
@pytest.mark.parametrize("idle", [{"idle__trainer_share": 0.8}, {"idle__fleet_share": 0.8}])
def test_an_idle_trainer_is_not_taken_for_slow_writing_or_training(idle: dict[str, float], waits_for: str | None):
    assert len(last_steps.tell([step(**idle)], waits_for)) == 2


def test_a_run_that_waited_for_rewards_is_told_so_and_the_function_named(tmp_path: Path, capsys):
    """As its page does: by the journal, not by the trainer having had nothing to do."""
    play = ["simulate", "elastic-8b", "--steps", "2", "--no-progress", "--out", str(tmp_path / "sim")]
    scored_s = ["domains.math.reward.duration_quantiles=[[0.0, 400.0], [1.0, 400.0]]"]
    assert main([*play, *scored_s, *(f"rewards.{key}=900" for key in ("t_min_s", "t_max_s", "wall_s"))]) == 0
    (tmp_path / LIVE_FOLDER).mkdir()
    (tmp_path / "sim" / FILE_NAME).rename(tmp_path / LIVE_FOLDER / f"{EVENTS}-000001.bin")
    (tmp_path / "recipe.toml").write_text('[train]\nsteps = 2\n[data]\nreward = "mine:slow"\n')
    stale = {"staleness/mean": 9.0}
    lines = [json.dumps({**step(idle__trainer_share=0.9), **stale, "step": number}) for number in range(2)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    assert main(["doctor", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "of the trainer's time goes to waiting for rewards\n    why: answers are written sooner" in out
    assert "the reward function mine:slow scores them" in out
    assert "writing is what takes long" not in out
    assert "alarm: stale data: tokens trained on are 9.0 versions old" in out
    assert main(["doctor", str(tmp_path), "--json"]) == 0
    assert [one["name"] for one in json.loads(capsys.readouterr().out)["alarms"]] == ["stale data"]


def test_doctor_prints_the_command_with_which_a_worker_joins(tmp_path: Path, capsys):
    recipe = load_recipe("arithmetic", ["model.path=models/tiny"])
    with manager_in_thread(tmp_path) as live:
        write_recipe(tmp_path, recipe)
        (tmp_path / "manager.json").write_text(json.dumps({"url": live.url, "pid": 1}))
        assert main(["doctor", str(tmp_path)]) == 1
        said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        f"a worker joins with: polyrl worker --join {live.url} --token-file {tmp_path}/worker.token "
    )
    assert said.split(" --model ")[1].split()[0].endswith("/models/tiny")


def test_doctor_prints_the_command_with_which_a_host_joins(tmp_path: Path, capsys):
    recipe = load_recipe("calculator", ["model.path=models/tiny", "environments.price_usd_per_hour=0.25"])
    with manager_in_thread(tmp_path) as live:
        write_recipe(tmp_path, recipe)
        (tmp_path / "manager.json").write_text(json.dumps({"url": live.url, "pid": 1}))
        assert main(["doctor", str(tmp_path)]) == 1
        said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith("a host joins with: polyrl env play calculator --model ")
    assert f" --join {live.url} --token-file {tmp_path}/host.token --as calculator --slots 128 --price 0.25" in said
    assert "style=" in said and "letters" in said
