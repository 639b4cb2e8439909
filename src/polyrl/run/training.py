"""A training run, put together and taken apart: manager, weights, the trainer's own worker, workers, the loop.

    manager (a process) <- client <- loop -> steps -> policy
       ^                                              ^ shared
       +---- local worker (in this process) -> engine-+
       +---- workers of [fleet] (processes), and whoever joins from elsewhere; weights come from here

Rules kept here: whatever was started is ended, in the opposite order, however the run ends. Ctrl+C ends it in good
order; a second one at once.
"""

import asyncio
import contextlib
import logging
import signal
import ssl
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
from rich.text import Text

from polyrl.client import Fleet, Prompt, RewardResult, Sample, connect
from polyrl.config.recipe import Recipe
from polyrl.engines.builtin.models import Loaded
from polyrl.errors import PolyrlError, UserError
from polyrl.run import checkpoints, local_worker, processes, workers
from polyrl.run.checkpoints import ResumePoint
from polyrl.run.display import Display
from polyrl.run.encryption import Encryption, check_reachable
from polyrl.run.processes import ManagerAddress, ManagerProcess
from polyrl.run.ranks import OtherRanks
from polyrl.run.reporting import Reporter, tell_of_rewards, tell_of_waits
from polyrl.run.settings import caveat_of, manager_options, sampling_of, scheduler_config, weight_settings
from polyrl.run.tasks import Tasks
from polyrl.run.validation import validator
from polyrl.telemetry import breaks
from polyrl.trainer.devices import Devices
from polyrl.trainer.leading import Learner
from polyrl.trainer.loop import Loop, NothingCameError
from polyrl.trainer.publishing import Publishing
from polyrl.trainer.state.saving import Saver
from polyrl.weights.server import WeightServer
from polyrl.weights.tensors import pin_buffer
from polyrl.wire.control import AnswerRules, DrainRequest, RunReply
from polyrl.wire.credentials import read_token_file
from polyrl.wire.dial import Dialer, Unreachable
from polyrl.worker.agent import Left

log = logging.getLogger("polyrl.train")

T = TypeVar("T")

_DISMISS_S = 5.0


class Interrupted(Exception):
    """Somebody pressed Ctrl+C, or sent SIGTERM."""


class LiveRun(NamedTuple):
    """What somebody beside the run can see and use of it."""

    recipe: Recipe
    run_dir: Path
    address: ManagerAddress
    workers: dict[str, Process]
    """Those of `[fleet]`, by name."""
    fleet: Fleet
    say: Callable[[str | Text], None]


Alongside = Callable[[LiveRun], Coroutine[Any, Any, None]]


async def train(
    recipe: Recipe,
    run_dir: Path,
    learner: Learner,
    tasks: Tasks,
    *,
    tls: Encryption | None = None,
    past: ResumePoint | None = None,
    other_ranks: OtherRanks | None = None,
    beside: Alongside | None = None,
) -> str:
    """Train to the end, or until interrupted. Returns why it ended.

    `past` is what the run goes on from; `other_ranks` are the other ranks; `beside` is played meanwhile.
    """
    first_step, policy = 0 if past is None else past.next_step, learner.policy
    leader = None if other_ranks is None else other_ranks.lead(learner)
    steps = learner.steps if leader is None else leader
    async with AsyncExitStack() as stack:
        port = await processes.choose_port(recipe.manager, 0 if past is None else past.port)
        manager = ManagerProcess(run_dir, recipe.manager.host, port, manager_options(recipe))
        stack.push_async_callback(manager.stop)
        address = await manager.start()
        checkpoints.write_port(run_dir, address.port)
        if tls is not None:
            address = ManagerAddress(tls.url(address.port), address.port, tls)
            await check_reachable(_dialer(run_dir, address))
        saver: Saver | None = None
        if recipe.checkpoint.enabled:
            gather = (learner if leader is None else leader).whole_state
            about = checkpoints.describe(recipe, policy, tasks.digests) if past is None else past.state
            saver = await asyncio.to_thread(checkpoints.make_saver, recipe, run_dir, about, gather, past)
            stack.push_async_callback(saver.stop)
        if past is not None:  # before there is an engine that takes memory; workers dial again meanwhile
            assert saver is not None, "who keeps no checkpoints has nothing to go on from"
            again = checkpoints.train_again(past, steps, saver, run_dir)
            await first_of(again, [one.failed() for one in (manager, other_ranks, saver) if one is not None], None)
        engine = await stack.enter_async_context(local_worker.started_engine(recipe, policy))
        if past is None:  # before the manager hears of a run: from then on nobody else may begin one here
            checkpoints.write_recipe(run_dir, recipe)
            if saver is not None:
                await saver.begin()
        fleet = await stack.enter_async_context(_connect(recipe, run_dir, address, tasks, policy.loaded))
        assert fleet.opened is not None
        if past is not None:
            fleet.digests.update(past.published)
            check_that_it_fits(fleet.opened, first_step, recipe.max_staleness)
        key = bytes.fromhex(fleet.opened.weights_key)
        server = WeightServer(
            weight_settings(recipe),
            key,
            None if tls is None else tls.of_weights,
            pin_buffer if policy.device.type == "cuda" else None,
        )
        server.start()
        stack.callback(server.close)
        devices = Devices(engine, generates=bool(recipe.train.local_generation))
        stack.callback(devices.close)
        worker = await stack.enter_async_context(
            local_worker.joined(recipe, _dialer(run_dir, address), fleet, engine, devices)
        )
        started = await stack.enter_async_context(workers.started(recipe, run_dir, address))
        if past is not None and past.breaks:
            breaks.note(run_dir, past.breaks)
        title = ", ".join(one for one in (recipe.name, caveat_of(recipe)) if one)
        display = Display(title, recipe.train.steps, _dialer(run_dir, address), local_worker.NAME)
        reporter = stack.enter_context(contextlib.closing(Reporter(recipe, run_dir, address, display, first_step)))
        await stack.enter_async_context(display)
        parents = {version: digests[-1] for version, digests in fleet.digests.items()}
        loop = Loop(
            recipe,
            fleet,
            steps,
            devices,
            Publishing(
                policy,
                server,
                engine,
                parents,
                None if leader is None else leader.weights,
                encodes=recipe.weights.encode_on == "device",
            ),
            tasks.tokens,
            reporter,
            validator(recipe, engine, devices, tasks, reporter, fleet, saver),
            saver,
        )
        reporter.begin(fleet)
        if past is not None:  # what it was called with now fits; the next --resume begins with that
            checkpoints.write_recipe(run_dir, recipe)
        if beside is not None:
            playing = beside(LiveRun(recipe, run_dir, address, started, fleet, display.say))
            await stack.enter_async_context(_meanwhile(playing))
        news = [
            workers.tell_who_ends(run_dir, started, display.say),
            workers.tell_who_is_turned_away(fleet, started, display.say),
        ]
        news.append(tell_of_rewards(fleet, tasks))
        if not display.progress.is_live:
            news.append(tell_of_waits(fleet, workers.doctor_command(recipe, run_dir, address.url), display.say))
        try:
            async with _meanwhile(*news):
                await workers.until_joined(recipe, fleet, started)
                failures = [one.failed() for one in (manager, other_ranks, saver, tasks) if one is not None]
                running = loop.run() if past is None else loop.run(first_step, past.last, is_told=past.is_told)
                why = await first_of(_with_reason(running, tasks), failures, worker)
        except PolyrlError:  # it will not go on by itself; who was interrupted may come back soon
            await _dismiss(fleet, _dialer(run_dir, address))
            raise
        await _dismiss(fleet, _dialer(run_dir, address))
        return why


def check_that_it_fits(opened: RunReply, first_step: int, max_staleness: int) -> None:
    """Raises UserError. The manager knows of every step that is on disk here before it is, and is never ahead by more
    than the open step and those asked for ahead.

    It knows nothing where the process before this one died as it was about to open the run.
    """
    last = first_step + max_staleness
    is_ahead = opened.last_requested > last or any(step > last for step in opened.open_steps)
    is_behind = opened.last_requested < first_step - 1
    if is_behind or is_ahead or opened.published > first_step:
        theirs = max(opened.last_requested, opened.published)
        lost = (
            "power failed before the journal was written: remove what checkpoints/ has beyond it, and go on from there"
        )
        raise UserError(
            f"checkpoint and log go up to step {first_step}, and the manager's journal to step {theirs}: they are not "
            f"of one run, or {lost if is_behind else 'the newest were removed'}"
        )


async def until_interrupted(run: Coroutine[Any, Any, str]) -> str:
    """What it returns. Interrupted by a signal, at whatever moment, it is taken apart in good order first."""
    interrupted = _listen_for_signals()
    running, stopping = asyncio.ensure_future(run), asyncio.ensure_future(interrupted.wait())
    try:
        await asyncio.wait((running, stopping), return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        raise Interrupted
    finally:
        for task in (running, stopping):
            task.cancel()
        await asyncio.gather(running, stopping, return_exceptions=True)


async def _with_reason(run: Coroutine[Any, Any, T], tasks: Tasks) -> T:
    try:
        return await run
    except NothingCameError as error:
        raise UserError(tasks.why_none_scored() or str(error)) from error


async def first_of(
    run: Coroutine[Any, Any, T],
    failures: Sequence[Coroutine[Any, Any, None]],
    worker: "asyncio.Task[Left] | None",
) -> T:
    """The run's own end, or whatever ends it before."""
    running = asyncio.ensure_future(run)
    failing = [asyncio.ensure_future(one) for one in failures]
    waited = {running, *failing, *([] if worker is None else [worker])}
    try:
        await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            return running.result()
        if worker is not None and worker.done():
            raise UserError(f"the trainer's own worker has left: {worker.result()}")
        for one in failing:
            if one.done():
                one.result()
        raise AssertionError("these wait until something fails")
    finally:
        for task in (running, *failing):
            task.cancel()
        await asyncio.gather(running, *failing, return_exceptions=True)


async def _dismiss(fleet: Fleet, dialer: Dialer) -> None:
    """Tell whoever joined that the run is over: a worker that is not told dials for ten minutes."""
    with contextlib.suppress(TimeoutError, Unreachable, UserError):
        async with asyncio.timeout(_DISMISS_S), dialer:
            for worker in (await fleet.status()).workers:
                if worker.name != local_worker.NAME:
                    await _drain(dialer, worker.name)
            while any(worker.name != local_worker.NAME for worker in (await fleet.status()).workers):
                await asyncio.sleep(0.1)


async def _drain(dialer: Dialer, name: str) -> None:
    with contextlib.suppress(UserError):  # it has left meanwhile: the others are still to be told
        await dialer.post(f"/v1/workers/{name}/drain", DrainRequest(reason="the run is over"), dict)


def _dialer(run_dir: Path, address: ManagerAddress) -> Dialer:
    return Dialer(address.url, read_token_file(run_dir / "admin.token"), _client_tls(address))


def _client_tls(address: ManagerAddress) -> ssl.SSLContext | None:
    return None if address.tls is None else address.tls.client


def _listen_for_signals() -> asyncio.Event:
    """Set by the first signal; the second one ends the process."""
    interrupted = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hear(number: signal.Signals) -> None:
        if not interrupted.is_set():
            log.warning("%s: stopping; once more to leave at once", number.name)
        interrupted.set()
        loop.remove_signal_handler(number)
        signal.signal(number, signal.SIG_DFL)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, hear, number)
    return interrupted


@asynccontextmanager
async def _connect(
    recipe: Recipe, run_dir: Path, address: ManagerAddress, tasks: Tasks, loaded: Loaded
) -> AsyncIterator[Fleet]:
    sampling = sampling_of(recipe)
    typical = int(np.mean([len(tasks.tokens(domain, 0)) for domain in range(len(tasks.names))]))
    config = scheduler_config(recipe, tasks.num_prompts, typical)

    def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
        return Prompt(tasks.tokens(domain, prompt).tolist(), sampling)

    async def reward_of(sample: Sample) -> RewardResult:
        origin = sample.origin
        answer = sample.tokens.tolist()
        score, parts = await tasks.score(origin.domain, origin.prompt, answer, sample.finish)
        return RewardResult(score, parts=parts)

    token = read_token_file(run_dir / "admin.token")
    async with connect(
        address.url,
        token,
        config,
        prompts=prompt_of,
        reward=reward_of,
        has_weights=True,
        caveat=caveat_of(recipe),
        trains=True,
        answers=AnswerRules(vocab=loaded.vocab, end_ids=tuple(sorted(loaded.end_ids)), max_context=loaded.max_context),
        tls=_client_tls(address),
    ) as fleet:
        yield fleet


@asynccontextmanager
async def _meanwhile(*playing: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """At the end they are cancelled, and what they failed of is heard."""
    tasks = [asyncio.create_task(one) for one in playing]
    try:
        yield
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
