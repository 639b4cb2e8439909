"""The worker processes of an emulated run: started, given notice and killed when the scenario's market says so."""

import asyncio
import signal
from asyncio.subprocess import Process
from collections.abc import Iterator, Sequence
from pathlib import Path

from msgspec import structs

from polyrl.config.supply_trace import read_supply_trace
from polyrl.engines.emulated import EmulatedConfig
from polyrl.ids import WorkerName
from polyrl.reproduce.emulation.scale import Scale, engine_config
from polyrl.run import processes
from polyrl.sim.scenario import Scenario
from polyrl.sim.supply import WorldEvent, plan_supply, speed_of

_HORIZON_S = 1e6
_TO_START_S = 2.0
"""Of real time, that a worker's process needs before it can join."""


def planned_world(scenario: Scenario, seed: int) -> list[WorldEvent]:
    trace = None if scenario.supply.trace is None else read_supply_trace(scenario.supply.trace)
    return plan_supply(scenario.fleet, scenario.supply, scenario.faults, seed, _HORIZON_S, trace=trace)


class WorkerProcesses:
    """Workers that come and go. `run_dir` is the manager's."""

    def __init__(self, scenario: Scenario, seed: int, scale: Scale, url: str, run_dir: Path) -> None:
        self._scenario, self._seed, self._scale = scenario, seed, scale
        self._url, self._run_dir = url, run_dir
        self._running: dict[WorkerName, Process] = {}
        self._taken: dict[WorkerName, None] = {}
        self._events = planned_world(scenario, seed)
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_at_first(self) -> int:
        return sum(self._is_first(event) for event in self._events)

    @staticmethod
    def _is_first(event: WorldEvent) -> bool:
        return event.kind == "grant" and event.at_s == 0.0 and not event.joins_at_s

    async def start(self) -> None:
        """Start the workers that are there from the beginning."""
        for event in self._events:
            if self._is_first(event):
                await self._spawn(event.worker, 0.0)

    def begin(self) -> None:
        """Begin the scenario's clock."""
        self._tasks.append(asyncio.create_task(self._play()))

    async def _play(self) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        for event in self._events:
            if not self._is_first(event):
                await asyncio.sleep(max(0.0, began + self._scale.real_s(event.at_s) - loop.time()))
                await self._happen(event)

    async def _happen(self, event: WorldEvent) -> None:
        name = event.worker
        if event.kind == "grant":
            joins_in_s = 0.0 if event.joins_at_s is None else event.joins_at_s - event.at_s
            await self._spawn(name, max(0.0, joins_in_s - _TO_START_S * self._scale.speedup))
        elif event.kind == "restart" and name not in self._taken:
            await self._spawn(name, 0.0)
        elif event.kind == "notice":
            self._send(name, signal.SIGTERM)
        elif event.kind in ("take", "die"):
            if event.kind == "take":
                self._taken[name] = None
            self._send(name, signal.SIGKILL)
            self._running.pop(name, None)

    def kill_newest(self, num: int) -> None:
        """Kill the newest workers, without a word."""
        for name in list(self._running)[-num:]:
            self._send(name, signal.SIGKILL)
            del self._running[name]

    def later(self, seconds: float, num_killed: int) -> None:
        """Kill so many of the newest workers after so many of the scenario's seconds."""

        async def kill() -> None:
            await asyncio.sleep(self._scale.real_s(seconds))
            self.kill_newest(num_killed)

        self._tasks.append(asyncio.create_task(kill()))

    async def end(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for name in list(self._running):
            self._send(name, signal.SIGKILL)
        await asyncio.gather(*(process.wait() for process in self._running.values()))

    def _send(self, name: WorkerName, number: signal.Signals) -> None:
        process = self._running.get(name)
        if process is not None and process.returncode is None:
            process.send_signal(number)

    async def _spawn(self, name: WorkerName, start_s: float) -> None:
        if name in self._running or name in self._taken:
            return
        log_file = self._run_dir / "logs" / f"{name}.log"
        self._running[name] = await processes.start([*self._arguments(name), f"start_s={start_s:g}"], log_file)

    def _arguments(self, name: WorkerName) -> Sequence[str]:
        fleet, scale = self._scenario.fleet, self._scale
        speed = fleet.speed * speed_of(name, self._scenario.faults, self._seed)
        config = engine_config(self._scenario, scale, local=False, speed=speed)
        joining = ("--join", self._url, "--token-file", str(self._run_dir / "worker.token"), "--name", name)
        costs = ("--price", f"{fleet.price_usd_per_hour * scale.speedup:g}", "--devices", str(fleet.devices_per_worker))
        notice = ("--notice", f"{scale.real_s(self._scenario.supply.notice_s):g}")
        spot = ("--spot", "none") if fleet.spot else ()
        engine = ("--engine", "emulated", *(f"{key}={value}" for key, value in _settings(config)))
        return ("worker", *joining, *costs, *spot, *notice, "--quiet", "--no-relay", *engine)


def _settings(config: EmulatedConfig) -> Iterator[tuple[str, object]]:
    """Yield the settings of a configuration that a worker has to be told."""
    usual = structs.asdict(EmulatedConfig())
    return ((key, value) for key, value in structs.asdict(config).items() if value != usual[key])
