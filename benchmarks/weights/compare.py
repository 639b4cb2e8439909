"""Weight transfers beside iperf3 and mooncake; deltas; late joiners.

Everything is in one run, so that all figures have the same neighbours; iperf3 and our pulls take turns.
"""

from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from benchmarks import delta, parser_of, tell
from benchmarks.environments import CannotMeasure
from benchmarks.weights import late_joiners, peers
from polyrl.bench import weights

GOALS = {
    "ratio_to_iperf3": 0.7,
    "times_mooncake": 2.0,
    "late_joiners.copies_sent": late_joiners.GOALS["copies_sent"],
    "late_joiners.times_one_copy": late_joiners.GOALS["times_one_copy"],
}


def main(argv: Sequence[str]) -> int:
    args = parser_of("weights", argv, __doc__).parse_args(argv)
    result = measure(quick=args.quick)
    return tell(result, weights.table(result), as_json=args.json)


def measure(*, quick: bool = False) -> dict[str, Any]:
    notes: dict[str, str] = {}
    iperf: dict[str, list[peers.Iperf]] = {}
    iperf_s = 1 if quick else 2
    result = weights.measure(quick, lambda num_streams: add_iperf(iperf, num_streams, iperf_s, notes))
    result |= beside_iperf(result, iperf)
    result["peers"] = _mooncake(result["num_bytes"], notes)
    if "mooncake" in result["peers"]:
        result["times_mooncake"] = round(result["pull_gb_s"] / result["peers"]["mooncake"]["best_gb_s"], 2)
    deltas = delta.measure(quick=quick)
    goals = {**result["goals"], **deltas.pop("goals"), **GOALS}
    size, workers = (32 << 20, 2) if quick else (512 << 20, 8)
    joined = late_joiners.measure(workers, size, 1000)
    return {**result, **deltas, "late_joiners": joined, "goals": goals, "notes": notes}


def add_iperf(
    found: dict[str, list[peers.Iperf]],
    num_streams: int,
    seconds: int,
    notes: dict[str, str],
    measure_one: Callable[[int, int], peers.Iperf] = peers.iperf3,
) -> None:
    """Add a run of iperf3; where it cannot be measured, a note and nothing else."""
    try:
        one = measure_one(num_streams, seconds)
    except CannotMeasure as why:
        notes["iperf3"] = str(why)
    else:
        found.setdefault(str(num_streams), []).append(one)


def beside_iperf(result: dict[str, Any], iperf: dict[str, list[peers.Iperf]]) -> dict[str, Any]:
    """Our figures beside those of iperf3; empty where iperf3 was not measured."""
    if not iperf:
        return {}
    runs = [one for values in iperf.values() for one in values]
    ceiling = max(one.best_gb_s for one in runs)
    ours = max(one["median"] for one in result["pull_gb_s_by_streams"].values())
    theirs = max(median(one.mean_gb_s for one in values) for values in iperf.values())
    return {
        "iperf3_gb_s": round(ceiling, 2),
        "iperf3_gb_s_by_streams": {
            name: {
                "best": round(max(one.best_gb_s for one in values), 2),
                "means": [round(one.mean_gb_s, 2) for one in values],
            }
            for name, values in iperf.items()
        },
        "iperf3_cpu_s_per_gb": round(median(one.cpu_s_per_gb for one in runs), 3),
        "ratio_to_iperf3": round(result["pull_gb_s"] / ceiling, 2),
        "ratio_of_best_medians": round(ours / theirs, 2),
        "shared_memory_ratio_to_iperf3": round(result["shared_memory_gb_s"] / ceiling, 2),
    }


def _mooncake(num_bytes: int, notes: dict[str, str]) -> dict[str, Any]:
    try:
        by_request = peers.mooncake_gb_s(num_bytes)
    except CannotMeasure as why:
        notes["mooncake"] = str(why)
        return {}
    return {"mooncake": {"best_gb_s": max(by_request.values()), "gb_s_by_request": by_request, "verified": False}}
