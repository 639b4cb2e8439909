"""Cases and how they are played: a shipped scenario with overrides; a player gives its steps, by seed.

`Player` is where: the simulator here, real processes in `emulation/`. Each case and seed is played once.
"""

import time
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from multiprocessing import get_context
from typing import NamedTuple, Protocol, TypeVar

from polyrl.errors import LawViolation
from polyrl.sim.library import load_scenario
from polyrl.sim.result import Measured, measure_steps
from polyrl.sim.simulation import Simulation

COLOCATED = ("run.mode=synchronous", "rewards.as_finished=false", "routing.balance=false", "fleet.workers=0")
"""The overrides that make a scenario its own synchronous baseline."""


class Variant(NamedTuple):
    """A shipped scenario and what is changed in it."""

    scenario: str
    overrides: tuple[str, ...] = ()


class Played(NamedTuple):
    steps: list[Measured]
    """Every step, the warm-up included."""
    warmup_steps: int
    took_s: float = 0.0
    """Real seconds."""

    @property
    def measured(self) -> list[Measured]:
        """The steps after the warm-up, cut to whole periods if there are long rounds."""
        ends = [index + 1 for index, step in enumerate(self.steps) if step.line.kind == "long"]
        starts = [start for start in (0, *ends) if start >= self.warmup_steps]
        return self.steps[starts[0] : ends[-1]] if ends and starts[0] < ends[-1] else self.steps[self.warmup_steps :]


Runs = list[Played]
"""One case, by seed."""
Key = TypeVar("Key", bound=Hashable)
OnRun = Callable[[int, int], None]
"""How many runs are done, and of how many."""


class Player(Protocol):
    def play(self, cases: Mapping[Key, Variant], at_least: int = 1) -> dict[Key, Runs]:
        """Play every case, with `at_least` as many seeds where few would show only noise."""
        ...


def simulate(case: Variant, seed: int) -> Played:
    """Play a case in the simulator. Raises LawViolation if a law is broken."""
    began = time.monotonic()
    scenario = load_scenario(case.scenario, list(case.overrides))
    sim = Simulation(scenario, seed)
    sim.run()
    if sim.law_violations:
        raise LawViolation(f"{case} with seed {seed}: {sim.law_violations[0]}")
    return Played(measure_steps(sim), scenario.run.warmup_steps, time.monotonic() - began)


class Simulator:
    """Plays cases in the simulator, in several processes."""

    def __init__(self, run_all: "RunAll", num_seeds: int, told: OnRun | None = None) -> None:
        self._run_all, self._num_seeds, self._told = run_all, num_seeds, told
        self._played: dict[tuple[Variant, int], Played] = {}

    def play(self, cases: Mapping[Key, Variant], at_least: int = 1) -> dict[Key, Runs]:
        seeds = range(max(self._num_seeds, at_least))
        wanted = [(case, seed) for case in dict.fromkeys(cases.values()) for seed in seeds]
        missing = [job for job in wanted if job not in self._played]
        for job, played in zip(missing, self._run_all(missing), strict=True):
            self._played[job] = played
            if self._told is not None:
                self._told(len(self._played), len(self._played) + sum(one not in self._played for one in missing))
        return {key: [self._played[case, seed] for seed in seeds] for key, case in cases.items()}


class Timed:
    """A player that says how long the runs of a section took, each once, also those that another had played before."""

    def __init__(self, player: Player) -> None:
        self._player = player
        self._took_s: dict[Variant, float] = {}

    def play(self, cases: Mapping[Key, Variant], at_least: int = 1) -> dict[Key, Runs]:
        played = self._player.play(cases, at_least)
        self._took_s |= {case: sum(one.took_s for one in played[key]) for key, case in cases.items()}
        return played

    @property
    def took_s(self) -> float:
        return sum(self._took_s.values())


RunAll = Callable[[list[tuple[Variant, int]]], Iterator[Played]]


def _simulate_job(job: tuple[Variant, int]) -> Played:
    return simulate(*job)


@contextmanager
def simulators(num_processes: int) -> Iterator[RunAll]:
    """Yield a function that simulates cases, and gives results in their order, each as soon as it is there."""
    if num_processes == 1:
        yield lambda jobs: map(_simulate_job, jobs)
        return
    with get_context("spawn").Pool(num_processes) as pool:
        yield lambda jobs: pool.imap(_simulate_job, jobs, chunksize=1)
