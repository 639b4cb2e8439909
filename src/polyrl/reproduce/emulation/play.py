"""Plays a case with real processes: a manager, its workers, and a trainer of emulated steps in this process."""

import asyncio
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AsyncExitStack
from pathlib import Path

from polyrl.client import Fleet, Prompt, RewardResult, Sample, connect
from polyrl.errors import PolyrlError
from polyrl.ids import SampleId, index_of
from polyrl.reproduce.emulation.scale import (
    Scale,
    check_that_it_can_be_emulated,
    manager_settings,
    scaled_config,
    whole,
)
from polyrl.reproduce.emulation.trainer import EmulatedTrainer, OwnDevices
from polyrl.reproduce.emulation.world import WorkerProcesses
from polyrl.reproduce.playing import Key, OnRun, Played, Runs, Variant
from polyrl.run.event_loop import run_loop
from polyrl.run.processes import ManagerProcess
from polyrl.sim.library import load_scenario
from polyrl.sim.result import Measured
from polyrl.sim.reward_model import ModelledRewards
from polyrl.sim.scenario import Scenario
from polyrl.sim.workload import Workload, read_trace
from polyrl.wire.credentials import read_token_file
from polyrl.wire.dial import Dialer
from polyrl.wire.frames import Sampling
from polyrl.wire.imposed import ImposedLengths

SPEEDUP = 10.0
_TOKENS_OF_THE_LONGEST = 1000
"""About so many real tokens has an answer that runs into the cap."""
_JOIN_TIMEOUT_S = 120.0
_STEP_TIMEOUT_S = 600.0
_FIRST_TOKEN = 3


class ModelledAnswers:
    """Prompts whose answers have the scenario's lengths, and their rewards: the simulator's, sample for sample."""

    def __init__(self, scenario: Scenario, seed: int, scale: Scale) -> None:
        trace = None if scenario.workload.trace is None else read_trace(scenario.workload.trace)
        growth = scenario.workload.growth_per_step
        self._workload = Workload(scenario.domains, scenario.run.max_new_tokens, seed, growth, trace)
        self._rewards = ModelledRewards(scenario.domains, seed)
        self._limits, self._scale = scenario.rewards, scale
        self._cap = scale.tokens(scenario.run.max_new_tokens)
        rounds = scenario.rounds
        self._num_samples = -(-rounds.samples_per_prompt * max(1.0, rounds.sample_factor) // 1)
        self._visits: dict[tuple[int, int], int] = {}

    def prompt_of(self, domain: int, prompt: int, epoch: int) -> Prompt:
        visit = self._visits.get((domain, prompt), -1) + 1
        self._visits[domain, prompt] = visit
        whole_lengths = [
            self._workload.answer_tokens(domain, prompt, visit, index) for index in range(int(self._num_samples))
        ]
        lengths = tuple(map(self._scale.tokens, whole_lengths))
        num_tokens = self._scale.tokens(self._workload.prompt_tokens(domain, prompt))
        text = [_FIRST_TOKEN + domain, _FIRST_TOKEN + prompt % 30_000, *[_FIRST_TOKEN] * num_tokens][:num_tokens]
        return Prompt(text, Sampling(imposed=ImposedLengths(lengths=lengths)))

    async def reward_of(self, sample: Sample) -> RewardResult:
        """Score after the modelled seconds, or at the limit; at once what was cut off at the cap."""
        if len(sample.tokens) >= self._cap:
            return RewardResult(0.0)
        origin = sample.origin
        limit_s = sample.limit_s if self._limits.adaptive else self._scale.real_s(self._limits.t_max_s)
        visit = self._visits[origin.domain, origin.prompt]
        whole_s, correct = self._rewards.natural(origin.domain, origin.prompt, visit, index_of(SampleId(sample.id)))
        natural_s = self._scale.real_s(whole_s)
        await asyncio.sleep(min(natural_s, limit_s))
        if natural_s > limit_s:
            return RewardResult(0.0, cpu_s=limit_s, outcome="timed_out")
        return RewardResult(float(correct), correct=correct, cpu_s=natural_s)


class Emulator:
    """Plays cases one after the other, each once for every seed."""

    def __init__(self, num_seeds: int, speedup: float = SPEEDUP, told: OnRun | None = None) -> None:
        self._num_seeds, self._speedup, self._told = num_seeds, speedup, told
        self._played: dict[tuple[Variant, int], Played] = {}

    def play(self, cases: Mapping[Key, Variant], at_least: int = 1) -> dict[Key, Runs]:
        seeds = range(max(self._num_seeds, at_least))
        wanted = [(case, seed) for case in dict.fromkeys(cases.values()) for seed in seeds]
        missing = [job for job in wanted if job not in self._played]
        for number, (case, seed) in enumerate(missing):
            if self._told is not None:
                self._told(number, len(missing))
            self._played[case, seed] = emulate(case, seed, self._speedup)
        return {key: [self._played[case, seed] for seed in seeds] for key, case in cases.items()}


def scale_of(scenario: Scenario, speedup: float) -> Scale:
    return Scale(speedup, max(1, round(scenario.run.max_new_tokens / _TOKENS_OF_THE_LONGEST)))


def emulate(case: Variant, seed: int, speedup: float = SPEEDUP) -> Played:
    """Raises UserError for a scenario that cannot be emulated."""
    began = time.monotonic()
    scenario = load_scenario(case.scenario, list(case.overrides))
    check_that_it_can_be_emulated(scenario)
    with tempfile.TemporaryDirectory(prefix="polyrl-reproduce-") as folder:
        steps = run_loop(_play(scenario, seed, scale_of(scenario, speedup), Path(folder)))
    return Played(steps, scenario.run.warmup_steps, time.monotonic() - began)


async def _play(scenario: Scenario, seed: int, scale: Scale, run_dir: Path) -> list[Measured]:
    (run_dir / "logs").mkdir()
    settings = manager_settings(scenario, scale)
    stream = settings.stream
    options = [
        f"stream.flush_interval_s={stream.flush_interval_s:g}",
        f"stream.heartbeat_interval_s={stream.heartbeat_interval_s:g}",
        f"limits.max_price_usd_per_hour={settings.limits.max_price_usd_per_hour:g}",
    ]
    manager = ManagerProcess(run_dir, "127.0.0.1", 0, options)
    answers = ModelledAnswers(scenario, seed, scale)
    async with AsyncExitStack() as stack:
        stack.push_async_callback(manager.stop)
        address = await manager.start()
        world = WorkerProcesses(scenario, seed, scale, address.url, run_dir)
        stack.push_async_callback(world.end)
        await world.start()
        token = read_token_file(run_dir / "admin.token")
        config = scaled_config(scenario, seed, scale)
        opened = connect(address.url, token, config, prompts=answers.prompt_of, reward=answers.reward_of)
        fleet = await stack.enter_async_context(opened)
        devices = OwnDevices(scenario, scale)
        await stack.enter_async_context(devices.working(lambda: Dialer(address.url, token)))
        num_workers = world.num_at_first + scenario.trainer.local_workers
        await _until(lambda: _num_joined(fleet), num_workers)
        return await _train(scenario, scale, fleet, devices, world)


async def _train(
    scenario: Scenario, scale: Scale, fleet: Fleet, devices: OwnDevices, world: WorkerProcesses
) -> list[Measured]:
    trainer = EmulatedTrainer(scenario, scale, fleet, devices)
    faults, steps = scenario.faults, list[Measured]()
    world.begin()
    await fleet.publish(0)
    ended_at, usd = None, 0.0
    for step in range(scenario.run.steps):
        for ahead in range(step, min(step + scenario.run.max_staleness + 1, scenario.run.steps)):
            await fleet.request(ahead)
        if faults.kill_workers and step == faults.kill_step:
            for seconds in faults.kill_at_s:
                world.later(seconds, faults.kill_workers)
        async with asyncio.timeout(_STEP_TIMEOUT_S):
            await trainer.train(step)
            line = whole(await fleet.line(step), scale)
        began = line.opened_at if ended_at is None else ended_at
        took_s = line.trained_at - began
        steps.append(
            Measured(line, took_s, line.closed_at - line.opened_at, trainer.tokens_trained[-1], line.usd - usd)
        )
        ended_at, usd = line.trained_at, line.usd
    return steps


async def _num_joined(fleet: Fleet) -> int:
    return len((await fleet.status()).workers)


async def _until(count: Callable[[], Awaitable[int]], wanted: int) -> None:
    try:
        async with asyncio.timeout(_JOIN_TIMEOUT_S):
            while await count() < wanted:
                await asyncio.sleep(0.1)
    except TimeoutError as error:
        raise PolyrlError(f"{wanted} workers have not joined in {_JOIN_TIMEOUT_S:.0f} s") from error
