"""The autoscaler on spot markets that it was not tuned on: tokens a dollar beside a fixed fleet and a greedy one.

Markets are drawn anew from seeds, by laws of the same three kinds as those that ship: `calm` has machines near the
published price, `busy` triples the price now and then and takes machines back, `scarce` has few and dear ones, for some
time none. Prices stay between $4 and the on-demand price of $20.95 an hour. Everything is simulated: the figures do not
depend on the machine.
"""

import csv
import math
import random
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

from benchmarks import parser_of, tell
from polyrl.bench.machine import commit
from polyrl.sim.library import load_scenario
from polyrl.sim.simulation import Simulation

USUAL, DEMAND, LEAST = 5.32, 20.95, 4.0
"""Dollars an hour for a worker of two H100: RLBoost's spot price, its on-demand price, and a bound."""
HORIZON_S = 40_000.0
NOT_SCALED = ("fleet.held_by_advice=false", "scaling.enabled=false")
FLEETS: dict[str, tuple[str, ...]] = {
    "autoscaler": (),
    "fixed": (*NOT_SCALED, "fleet.hold_at_most=4"),
    "greedy": (*NOT_SCALED, "fleet.hold_at_most=99"),
}


class MarketKind(NamedTuple):
    every_s: float
    """The mean time between two changes."""
    usd: float
    spread: float
    """Of a price around its mean, as a share of it."""
    spike_share: float
    """The share of changes that begin a spell of triple prices; as many end one."""
    machines: tuple[int, int]
    gone_share: float
    """The share of changes to hardly any machine at all."""


KINDS = {
    "calm": MarketKind(1800.0, USUAL, 0.08, 0.0, (8, 12), 0.0),
    "busy": MarketKind(700.0, USUAL, 0.12, 0.25, (3, 10), 0.1),
    "scarce": MarketKind(1100.0, 9.0, 0.12, 0.1, (3, 5), 0.15),
}


def main(argv: Sequence[str]) -> int:
    parser = parser_of("markets", argv, __doc__)
    parser.add_argument("--seeds", type=int, default=4, help="markets of each kind")
    args = parser.parse_args(argv)
    result = measure(1 if args.quick else args.seeds, 4 if args.quick else 30)
    return tell(result, list(_lines(result["tokens_per_usd"])), as_json=args.json)


def measure(num_seeds: int, num_steps: int) -> dict[str, Any]:
    """Return tokens a dollar of each fleet on each market."""
    found: dict[str, dict[str, float]] = {}
    with tempfile.TemporaryDirectory(prefix="polyrl-markets-") as folder:
        for kind in KINDS:
            for seed in range(num_seeds):
                trace = Path(folder) / f"{kind}-{seed}.csv"
                write_market(trace, kind, seed)
                found[f"{kind}, {seed}"] = {
                    name: _tokens_per_usd(f"spot-{kind}", num_steps, f"supply.trace={trace}", *more)
                    for name, more in FLEETS.items()
                }
    return {"commit": commit(), "steps": num_steps, "tokens_per_usd": found}


def write_market(path: Path, kind: str, seed: int) -> None:
    law, rng = KINDS[kind], random.Random(f"{kind} {seed}")
    at_s, is_dear = 0.0, False
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(("at_s", "workers", "usd_per_hour"))
        while at_s < HORIZON_S:
            if rng.random() < law.spike_share:
                is_dear = not is_dear
            num = rng.randint(0, 1) if rng.random() < law.gone_share else rng.randint(*law.machines)
            usd = law.usd * math.exp(rng.gauss(0.0, law.spread)) * (3.0 if is_dear else 1.0)
            rows.writerow((round(at_s), num, round(min(DEMAND, max(LEAST, usd)), 2)))
            at_s += max(1.0, rng.expovariate(1 / law.every_s))


def _tokens_per_usd(scenario: str, num_steps: int, *overrides: str) -> float:
    sim = Simulation(load_scenario(scenario, [f"run.steps={num_steps}", *overrides]))
    sim.run()
    return sim.tokens_at_step[-1] / sim.lines[-1].usd


def _lines(found: dict[str, dict[str, float]]) -> Iterator[str]:
    yield "tokens a dollar; the autoscaler against the fixed fleet, and the greedy one"
    for market, its in found.items():
        yield f"{market:10s} {its['autoscaler']:9,.0f} {_gain(its, 'fixed'):+7.1%} {_gain(its, 'greedy'):+7.1%}"
    for kind in KINDS:
        of_kind = [its for market, its in found.items() if market.startswith(kind)]
        for name in ("fixed", "greedy"):
            gains = [_gain(its, name) for its in of_kind]
            ahead = sum(one > 0 for one in gains)
            yield f"{kind}: {fmean(gains):+.1%} of {name} in the mean, better on {ahead} of {len(gains)}"


def _gain(its: dict[str, float], other: str) -> float:
    return its["autoscaler"] / its[other] - 1
