"""Emulated step times beside simulated ones: the same steps of the same case and seed.

The simulator misses a dead worker as late as the emulated run does; nothing else of a case is changed for it.
"""

from collections.abc import Callable, Mapping

from polyrl.reproduce.comparing import Section, Table
from polyrl.reproduce.emulation.play import scale_of
from polyrl.reproduce.emulation.scale import as_patient
from polyrl.reproduce.measures import step_s
from polyrl.reproduce.playing import Key, Played, Player, Runs, Variant, simulate
from polyrl.sim.library import load_scenario

APART = 0.1
"""Emulated and simulated step times of a case agree within this share."""
_FEW = 6

Simulate = Callable[[Variant, int], Played]


class Beside:
    """A player that keeps what it played, and says afterwards what the simulator makes of it."""

    def __init__(self, player: Player, speedup: float, simulate_one: Simulate = simulate) -> None:
        self._player, self._speedup, self._simulate = player, speedup, simulate_one
        self._played: dict[str, tuple[Variant, Runs]] = {}

    def play(self, cases: Mapping[Key, Variant], at_least: int = 1) -> dict[Key, Runs]:
        played = self._player.play(cases, at_least)
        self._played |= {_name(key): (case, played[key]) for key, case in cases.items()}
        return played

    def tell(self, section: Section) -> None:
        """Add a table of the step times, and whether all of them agree."""
        rows: list[list[str]] = []
        ratios: dict[str, float] = {}
        for name, (case, runs) in self._played.items():
            simulated = [self._simulated(case, seed) for seed in range(len(runs))]
            steps = [step for one in runs for step in one.steps]
            wanted = [step for one in simulated for step in one.steps]
            ratios[name] = step_s(steps) / step_s(wanted)
            each = [f"{one.step_s:.0f} ({its.step_s:.0f})" for one, its in zip(steps, wanted, strict=True)]
            shown = ", ".join(each) if len(each) <= _FEW else f"{len(each)} steps"
            rows.append([name, f"{step_s(steps):.0f}", f"{step_s(wanted):.0f}", f"{ratios[name]:.3f}", shown])
        header = ("", "emulated", "simulated", "ratio", "each step, emulated (simulated)")
        section.tables.append(
            Table("Step times in seconds, emulated beside simulated: the mean of all steps", header, rows)
        )
        worst = max(ratios, key=lambda name: abs(ratios[name] - 1.0))
        section.claim(
            f"emulated and simulated step times agree within {APART:.0%} in every case (farthest: {worst}, "
            f"{ratios[worst]:.3f})",
            holds=abs(ratios[worst] - 1.0) <= APART,
        )

    def _simulated(self, case: Variant, seed: int) -> Played:
        scale = scale_of(load_scenario(case.scenario, list(case.overrides)), self._speedup)
        return self._simulate(Variant(case.scenario, (*case.overrides, *as_patient(scale))), seed)


def _name(key: object) -> str:
    return " ".join(map(str, key)) if isinstance(key, tuple) else str(key)
