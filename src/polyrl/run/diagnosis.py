"""Explain why a run waits: `diagnose` is a pure function of two status replies of the manager, a moment apart.

    trainer --> groups --> rewards --> samples --> workers --> weights --> trainer

Each part waits for a part further along. The first finding is the part that all others wait for now; the others are
workers that do not do their work. Each says since when, what happens next by itself, and what a person could do.

Rules kept here: every finding follows from the manager's replies. Unknown facts are left out, not guessed: the only
estimate is an upper bound on the time that a sample still needs, from the pace of its worker.
For a run without a process, `diagnose_remains` reads the run's directory.
"""

import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyrl.config import load_toml
from polyrl.errors import UserError
from polyrl.run.changes import begin_anew
from polyrl.run.findings import Diagnosis, Finding, count, left, wait_of
from polyrl.run.worker_findings import of_refusals, of_turned_away, of_workers
from polyrl.telemetry import metrics
from polyrl.telemetry.looks import show_seconds
from polyrl.telemetry.metrics import MetricValue
from polyrl.wire.control import RoundStatus, Status, WorkerStatus

_LONG_S = 20.0
"""A part of a step that lasts longer may be a process that stands still."""


def diagnose(earlier: Status, now: Status, run_dir: str = "RUN_DIR", *, tail_batching: str | None = None) -> Diagnosis:
    """Explain what the run waits for. `run_dir` is put into the commands that findings suggest; `tail_batching`: the
    recipe's setting, where it is known."""
    main = _of_trainer(now, run_dir) or _of_round(now, tail_batching)
    return Diagnosis(
        _is_moving(earlier, now),
        (main, *_of_failures(now, run_dir), *of_workers(earlier, now), *of_turned_away(now), *of_refusals(now)),
    )


def read_steps(run_dir: Path) -> list[dict[str, MetricValue]]:
    """Return the metrics of a run's trained steps. Raises UserError for a directory without a run."""
    if not (run_dir / "journal").is_dir():
        raise UserError(f"{run_dir}: no run there; expected a directory with a journal")
    file = run_dir / metrics.FILE_NAME
    return metrics.read_steps(file) if file.exists() else []


def diagnose_stopped(run_dir: Path) -> Diagnosis | None:
    """Diagnose a run whose manager's process is stopped on this machine, and answers no request; None: it is not."""
    try:
        pid = int(json.loads((run_dir / "manager.json").read_text())["pid"])
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, ValueError, LookupError, TypeError):  # it has ended, or runs elsewhere
        return None
    if state not in ("T", "t") or b"manager" not in words:
        return None
    what = f"its manager, process {pid}, is stopped (SIGSTOP, or a debugger), and answers no request"
    return Diagnosis(False, (Finding(what, "nothing", f"let it go on: kill -CONT {pid}", needs_help=True),))


def diagnose_remains(run_dir: Path, steps: Sequence[Mapping[str, MetricValue]]) -> Diagnosis:
    """Diagnose a run without a manager, from the recipe that it was started with and its trained steps."""
    file = run_dir / "recipe.toml"
    if not file.exists():
        return Diagnosis(False, (Finding("no manager runs there", "nothing"),))
    recipe = load_toml(file)
    if why := _why_done(run_dir, recipe, steps):
        return Diagnosis(False, (Finding(f"the run is done: {why}", "nothing"),))
    what = f"it does not run: {len(steps)} of {recipe.get('train', {}).get('steps')} steps are trained"
    if recipe.get("checkpoint", {}).get("enabled", True):
        do = f"go on with it: {resume_command(str(run_dir))}"
    else:
        do = f"{begin_anew(run_dir, has_weights=False)}: checkpoint.enabled = false kept nothing"
    return Diagnosis(False, (Finding(what, "nothing", do, needs_help=True),))


def _why_done(run_dir: Path, recipe: dict[str, Any], steps: Sequence[Mapping[str, MetricValue]]) -> str | None:
    """Return why a run is done, so that `--resume` refuses it; None if steps are left to train."""
    train, num_steps = recipe.get("train", {}), len(steps)
    if num_steps == train.get("steps"):
        return f"all {num_steps} steps are trained"
    enough, reward = train.get("stop_at_reward"), steps[-1].get("reward/mean") if steps else None
    if enough is not None and isinstance(reward, int | float) and reward >= enough:
        return f"the mean reward has reached {enough:g}, after {num_steps} steps"
    if recipe.get("data", {}).get("num_epochs") is None:
        return None
    from polyrl.trainer.state import checkpoint

    return f"the data has ended, after {num_steps} steps" if checkpoint.has_data_ended(run_dir, num_steps) else None


def resume_command(run_dir: str) -> str:
    return f"polyrl train --resume {shlex.quote(run_dir)}"


def _is_moving(earlier: Status, now: Status) -> bool:
    return now.trainer_does in ("trains", "validates") or _progress(earlier) != _progress(now)


def _progress(status: Status) -> tuple[object, ...]:
    rounds = tuple((one.step, one.samples_generated, one.groups_delivered) for one in status.rounds)
    return status.tokens_received, status.published, rounds


# The trainer


def _of_trainer(now: Status, run_dir: str) -> Finding | None:
    """Return what is known of the trainer; None if it is present and the run does not wait for it."""
    if now.run == "none":
        return Finding(
            f"no trainer has opened a run since the manager started, {show_seconds(now.uptime_s)} ago",
            f"the manager waits as long as it takes, and {count(len(now.workers), 'worker')} with it; a trainer that "
            "was just started opens one when its model is loaded",
            "start a trainer: polyrl train RECIPE starts its own manager; client.connect opens a run on this one",
            needs_help=True,
        )
    if now.trainer == "none":
        return _without_trainer(now)
    if now.trainer != "attached":
        wait = wait_of(now, "trainer")
        since = "" if wait is None or wait.age_s is None else f", for {show_seconds(wait.age_s)}"
        return Finding(
            f"the trainer is away{since}",
            f"what runs ({count(_num_running(now), 'sample')}) goes on, and what it writes is kept; a trainer whose "
            "process lives dials in again by itself",
            f"if its process is gone: polyrl train --resume {run_dir}",
            needs_help=True,
        )
    if now.paused:
        return Finding(
            "the run is paused",
            f"what runs ({count(_num_running(now), 'sample')}) goes on; nothing else is given to a worker",
            "POST /v1/resume with the admin token lets it go on",
            needs_help=True,
        )
    if now.published < 0:
        return Finding(
            "the trainer has not published a first version",
            "workers pull it as soon as it is there; a large model takes minutes to load",
            "if it lasts longer, the trainer's output says what it does",
        )
    since = "" if now.trainer_since_s is None else f", for {show_seconds(now.trainer_since_s)}"
    step = f" of step {now.rounds[0].step}" if now.rounds else ""
    if now.trainer_does == "validates":
        return Finding(f"the trainer validates{since}", "what workers write meanwhile is kept for the step")
    if now.trainer_does == "trains":
        is_long = now.trainer_since_s is not None and now.trainer_since_s > _LONG_S
        do = "if steps take less, see whether the trainer's process runs, and what its output says" if is_long else ""
        return Finding(f"the trainer trains on groups{step}{since}", _meanwhile(now), do)
    if not now.rounds:
        return Finding(
            "the trainer has no round open: it updates the weights, publishes or saves them",
            "it opens the next one by itself",
        )
    return None


def _without_trainer(now: Status) -> Finding:
    """Return the finding for a manager that was started with --serve."""
    asked = count(now.queues.get("samples_asked", 0), "answer")
    what = f"the run has no trainer and serves clients: {asked} not ended"
    if any(_may_write(one) for one in now.workers):
        return Finding(what, "workers write the answers")
    return Finding(
        f"{what}, and no worker can write{'' if now.workers else _lost(now)}",
        "answers wait as long as their clients do",
        "have a worker join: the command is in the first lines of the manager's output",
        needs_help=not _may_come_back(now),
    )


def _meanwhile(now: Status) -> str:
    num = _num_running(now)
    if not num:
        return "the fleet has nothing to do until the next version is there"
    return f"{count(num, 'sample')} {'runs' if num == 1 else 'run'} meanwhile"


# A round


def _of_round(now: Status, tail_batching: str | None) -> Finding:
    """Return the finding for the oldest round: the trainer takes no other before that one is done."""
    round_ = now.rounds[0]
    if round_.groups_delivered >= round_.groups:
        if (told := now.rewards) is not None and told.running:
            return Finding(
                f"all {round_.groups} groups of step {round_.step} are with the trainer, and rewards of whole groups "
                f"run; {told.function} has run longest, for {show_seconds(told.longest_s)}",
                f"one that takes longer than rewards.timeout_s = {told.timeout_s:g} is ended, and its group replaced",
                "a quicker function, or more rewards.processes; reward workers add to them",
                stalls=True,
            )
        return Finding(
            f"all {round_.groups} groups of step {round_.step} are with the trainer, which has not said that it trains",
            "it takes what it has not taken, updates the weights and publishes them by itself",
            "if it lasts, the trainer's output says what it does",
        )
    missing = f"step {round_.step} lacks {count(round_.groups - round_.groups_delivered, 'group')} of {round_.groups}"
    if now.trainer_does == "waits" and now.trainer_since_s is not None:
        missing += f", and the trainer has had nothing to do for {show_seconds(now.trainer_since_s)}"
    if now.queues.get("groups_without_prompt"):
        number = now.queues["groups_without_prompt"]
        return Finding(
            f"{missing}: the trainer has not sent {count(number, 'prompt')}",
            "it sends them by itself",
            "if it lasts, look at the trainer's output: its data source may hang",
        )
    writers = [one for one in now.workers if _may_write(one)]
    if round_.episodes_unhosted and not any(one.connected and not one.draining for one in now.hosts):
        return _nobody_plays(now, round_, missing)
    if round_.samples_waiting and not writers:
        return _nobody_writes(now, round_, missing)
    if round_.samples_waiting:
        return _too_few_places(now, round_, missing, writers)
    if round_.episodes_unhosted or round_.episodes_playing:
        return _environments(now, round_, missing)
    if round_.samples_running:
        return _last_samples(now, round_, missing, tail_batching)
    return _rewards(now, missing)


def _nobody_writes(now: Status, round_: RoundStatus, missing: str) -> Finding:
    waiting = f"{missing}: {count(round_.samples_waiting, 'sample')} wait"
    if not now.workers:
        return Finding(
            f"{waiting}, and there is no worker{_lost(now)}",
            "they wait as long as it takes; a worker that was just started joins when its engine is up",
            "have a worker join: the command is in the first lines of the trainer's output",
            needs_help=True,
        )
    comes_back = _may_come_back(now)
    return Finding(
        f"{waiting}, and no worker can write",
        "the first worker that can takes them; below is what each of them does" if comes_back else "they wait",
        "" if comes_back else "have a worker join",
        needs_help=not comes_back,
    )


def _nobody_plays(now: Status, round_: RoundStatus, missing: str) -> Finding:
    """Return the finding for the wait `hosts`."""
    there = ", ".join(f"{one.name} is {'draining' if one.connected else 'away'}" for one in now.hosts)
    return Finding(
        f"{missing}: {count(round_.episodes_unhosted, 'episode')} wait, and no host is there to play them"
        f"{f' ({there})' if there else ''}",
        "they wait as long as it takes; a host that was just started joins when its environment is ready; those that "
        "the run itself started (environments.processes) are started again",
        "start a host: polyrl env play NAME --join URL --token-file host.token, with the run's environment as NAME",
        needs_help=True,
    )


def _environments(now: Status, round_: RoundStatus, missing: str) -> Finding:
    """Return the finding for episodes that wait for their environment, or for a place at a host."""
    places = sum(one.slots for one in now.hosts if one.connected)
    what = (
        f"{missing}: {count(round_.episodes_playing, 'episode')} wait for their environment, and workers write in "
        f"{round_.samples_running:,}"
    )
    limits = [
        f"{words} in {left(wait)} at the latest"
        for name, words in (
            ("turn", "the environment that is slowest to answer is given up"),
            ("episode", "the oldest episode ends"),
        )
        if (wait := wait_of(now, name)) is not None
    ]
    then = "; ".join(["each goes on with its environment's next call, or ends with a reward", *limits])
    if not round_.episodes_unhosted:
        do = "look at what its tools wait for; environments.turn_timeout_s bounds how long one may take"
        return Finding(what, then, do)
    return Finding(
        f"{what}; {round_.episodes_unhosted:,} more wait for one of {places:,} places at hosts",
        then,
        "another host, or a larger environments.slots, plays more at once",
    )


def _may_come_back(now: Status) -> bool:
    return any(one.connected and one.state in ("pulling", "waiting", "down", "active") for one in now.workers)


def _lost(now: Status) -> str:
    joined, lost = now.ledger.get("workers_joined", 0), now.ledger.get("workers_lost", 0)
    return f" ({count(joined, 'time')} one joined, {count(lost, 'time')} one was lost)" if joined else ""


def _too_few_places(now: Status, round_: RoundStatus, missing: str, writers: list[WorkerStatus]) -> Finding:
    pace = sum(one.tokens_per_s for one in writers)
    return Finding(
        f"{missing}: {count(round_.samples_running, 'sample')} run on {count(len(writers), 'worker')} "
        f"({pace:,.0f} tokens/s together), {round_.samples_waiting:,} more wait for a place there",
        "each takes the place of one that ends",
        "more workers write more at once; `polyrl plan` says how many are worth their price",
    )


def _last_samples(now: Status, round_: RoundStatus, missing: str, tail_batching: str | None) -> Finding:
    what = f"{missing}: the last {count(round_.samples_running, 'sample')} run, and none waits"
    on = next((one for one in now.workers if one.name == round_.longest_on), None)
    if on is None:
        return Finding(what, "the step has its groups when they end", "a lower rollout.max_new_tokens cuts them off")
    what += f"; the longest has {round_.longest_tokens:,} tokens, on {on.name}"
    left = now.max_new_tokens - round_.longest_tokens
    pace = on.tokens_per_s / on.running if on.running else 0.0
    at_most = f", in about {show_seconds(left / pace)} at most" if pace > 0 and left > 0 else ""
    packs = round_.kind == "long" or tail_batching not in (None, "off")
    is_off = "where it is off, rounds.tail_batching" if tail_batching is None else "rounds.tail_batching (off now)"
    do = (
        "a lower rollout.max_new_tokens cuts the longest off"
        if packs
        else f"{is_off} packs the longest answers into rare long rounds"
    )
    return Finding(what, f"it ends by itself{at_most} ({now.max_new_tokens:,} tokens are allowed)", do)


def _rewards(now: Status, missing: str) -> Finding:
    running, waiting = now.queues.get("rewards_running", 0), now.queues.get("rewards_waiting", 0)
    if not running and not waiting:
        return Finding(f"{missing}: all answers are written and scored", "they go to the trainer by themselves")
    if (wait := wait_of(now, "reward workers")) is not None:
        there = "".join(f"; {one.name} is {one.state if one.connected else 'away'}" for one in now.reward_workers)
        what = f"{missing}: {wait.of} wait to be scored, and no reward worker can{there}"
        do = "start a reward worker: polyrl worker --rewards --join URL --token-file reward.token"
        return Finding(what, "they wait as long as it takes: rewards.processes = 0", do, needs_help=True)
    do = (
        "rewards.processes is how many plain functions run at once; reward workers add to them"
        if waiting
        else "a quicker function, or a lower rewards.timeout_s"
    )
    what = f"{missing}: {running:,} answers are being scored, {waiting:,} wait for it"
    if not running:  # the trainer tells once a second how many functions run
        what = f"{missing}: {count(waiting, 'answer')} {'is' if waiting == 1 else 'are'} with the reward functions"
    told = now.rewards
    if told is None or not told.running:
        wait = wait_of(now, "reward")
        until = ""
        if wait is not None and wait.given_up_in_s is not None:
            until = f"; one that is not answered is given up in {left(wait)}"
        return Finding(what, f"they end{until}", do, stalls=True)
    return Finding(
        f"{what}; {told.function} has run longest, for {show_seconds(told.longest_s)}",
        f"one that takes longer than rewards.timeout_s = {told.timeout_s:g} is ended, and its sample dropped",
        do,
        stalls=True,
    )


def _of_failures(now: Status, run_dir: str) -> Iterator[Finding]:
    """Yield findings for rewards and episodes that failed."""
    dropped = now.ledger.get("samples_discarded", {}).get("reward_failed", 0)
    failed = dropped if now.rewards is None else max(dropped, now.rewards.failed)
    if failed:
        last = f"; the last: {now.rewards.why}" if now.rewards is not None and now.rewards.why else ""
        yield Finding(
            f"{count(failed, 'answer')} had no reward so far{last}",
            "each was dropped; its group is trained without it, as long as enough are left",
            f"{run_dir}/logs/rewards.log has what functions printed, and their tracebacks",
        )
    failed, dropped = (now.ledger.get(key, {}).get("failed", 0) for key in ("episodes_ended", "prompts_dropped"))
    if failed:
        lost = f"; {count(dropped, 'prompt')} lost so many that no group was left" if dropped else ""
        yield Finding(
            f"{count(failed, 'episode')} failed so far, through no fault of the policy{lost}",
            "each began again, or left its group: none is a zero",
            f"{run_dir}/logs/manager.log has the reasons",
        )


# Reading a status


def _may_write(worker: WorkerStatus) -> bool:
    return worker.connected and worker.state == "active" and worker.duty == "generating"


def _num_running(now: Status) -> int:
    return now.queues.get("samples_running", 0)
