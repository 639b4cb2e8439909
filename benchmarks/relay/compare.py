"""CPU and latency of carrying tokens from engines to a trainer: the manager and relays of others, in turns.

Goals: 2,000,000 tokens a second saturated on one core with the journal on; 20 times fewer CPU-seconds a token than the
better of sglang-router and vllm-router at 25,000 tokens a second, 50 times saturated; a cost that does not grow from
256 to 4,096 samples by more than half, nor with the length of answers; under 4,096 bytes a sample beside its tokens.
"""

import os
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from benchmarks import environments, parser_of, tell
from benchmarks.relay.load import NUM_TURNS, NUM_WORKERS, Latency, Load, Reading, build_programs, middles
from benchmarks.relay.ours import NAME, measure_delivery, measure_ours
from benchmarks.relay.peers import Direct, install_peers, take_turn
from polyrl.bench.machine import commit, cpu
from polyrl.errors import UserError

ROUTERS = ("sglang-router", "vllm-router")
GOALS = {
    "saturated_tokens_per_s": 2_000_000,
    "ratio_to_best_router": {"paced": 20, "saturated": 50},
    "growth_256_to_4096": 1.5,
    "growth_with_length": 1.5,
    "bytes_per_sample": 4096,
}
_LENGTHS = (256, 8192)
CACHE = environments.CACHE / "relay"


def main(argv: Sequence[str]) -> int:
    parser = parser_of("relay", argv, __doc__)
    parser.add_argument("--workers", type=int, default=NUM_WORKERS, help="that share the samples (default: 16)")
    args = parser.parse_args(argv)
    result = measure(args.workers, quick=args.quick)
    return tell(result, table(result), as_json=args.json)


def measure(num_workers: int = NUM_WORKERS, *, quick: bool = False, cache: Path = CACHE) -> dict[str, Any]:
    """Raises UserError for more workers than samples."""
    num_samples = [num for num in ((64,) if quick else (256, 1024, 4096)) if num >= num_workers]
    if not num_samples or num_workers < 1:
        most = 64 if quick else 4096
        raise UserError(f"--workers: {num_workers}; expected 1 to {most}: a worker has at least one sample")
    seconds, num_turns = (1.0, 1) if quick else (3.0, NUM_TURNS)
    cache.mkdir(parents=True, exist_ok=True)
    missing: dict[str, str] = {}
    peers = [] if quick else install_peers(cache, missing)
    programs = build_programs(cache)
    by_length = (
        {}
        if quick
        else {
            length: measure_ours(
                Load("saturated", max(1024, num_workers), seconds, num_workers), cache=cache, length=length
            ).cpu_us_per_token
            for length in _LENGTHS
        }
    )
    readings: list[Reading] = []
    delivery: dict[int, Latency] = {}
    for num in num_samples:
        for name in ("paced", "saturated"):
            load = Load(name, num, seconds, num_workers)
            taken: list[Reading] = []
            for _ in range(num_turns):
                taken += take_turn(peers, load, programs, missing, cache=cache)
                taken.append(measure_ours(load, cache=cache))
            readings += middles(taken)
        delivery[num] = measure_delivery(Load("paced", num, seconds, num_workers), cache=cache)
    return _result(readings, delivery, by_length, missing, {peer.name: peer.version for peer in peers}, quick=quick)


def _result(
    readings: list[Reading],
    delivery: dict[int, Latency],
    by_length: dict[int, float],
    missing: dict[str, str],
    versions: dict[str, str],
    *,
    quick: bool,
) -> dict[str, Any]:
    nums = list(delivery)
    ours = {(one.load, one.num_samples): one for one in readings if one.relay == NAME}
    ratios = {name: {num: ratio_to_best_router(readings, name, num) for num in nums} for name in ("paced", "saturated")}
    most, least = ours["paced", nums[-1]], ours["paced", nums[0]]
    full = ours["saturated", nums[-1]]
    direct = {(one.load, one.num_samples): one.latency_ms for one in readings if one.relay == Direct.name}
    return {
        "tokens_per_cpu_s": full.tokens_per_cpu_s,
        "saturated_tokens_per_s": max(one.tokens_per_s for key, one in ours.items() if key[0] == "saturated"),
        "ratio_to_best_router": ratios,
        "added_latency_ms": msgspec.to_builtins(delivery[nums[-1]].beyond(direct["paced", nums[-1]])),
        "by_concurrency": {
            num: {
                "tokens_per_cpu_s": {name: ours[name, num].tokens_per_cpu_s for name in ("paced", "saturated")},
                "cpu_us_per_token": {name: ours[name, num].cpu_us_per_token for name in ("paced", "saturated")},
                "tokens_per_s": {name: ours[name, num].tokens_per_s for name in ("paced", "saturated")},
                "added_latency_ms": msgspec.to_builtins(delivery[num].beyond(direct["paced", num])),
                "ratio_to_best_router": {name: ratios[name][num] for name in ("paced", "saturated")},
            }
            for num in nums
        },
        "growth_256_to_4096": round(most.cpu_us_per_token / least.cpu_us_per_token, 2),
        "cpu_us_per_token_by_answer_length": by_length,
        "bytes_per_sample": most.bytes_per_sample,
        "goals": GOALS,
        "peers": msgspec.to_builtins([one for one in readings if one.relay != NAME]),
        "ours": msgspec.to_builtins(list(ours.values())),
        "missing": missing,
        "versions": versions,
        "quick": quick,
        "machine": {"cpu": cpu(), "num_cpus": os.cpu_count(), "python": platform.python_version()},
        "commit": commit(),
    }


def ratio_to_best_router(readings: list[Reading], load: str, num_samples: int) -> float | None:
    """How many times the CPU of ours the cheaper of the two routers takes; None when there is neither."""
    at = [one for one in readings if one.load == load and one.num_samples == num_samples]
    routers = [one.cpu_us_per_token for one in at if one.relay in ROUTERS]
    ours = [one.cpu_us_per_token for one in at if one.relay == NAME]
    return round(min(routers) / ours[0], 1) if routers and ours and ours[0] else None


def table(result: dict[str, Any]) -> list[str]:
    lines = [
        f"{'relay':<15}{'load':<11}{'samples':>8}{'tokens/s':>12}{'us/token':>10}{'least..most':>15}{'MB':>7}",
    ]
    rows = [*result["peers"], *result["ours"]]
    for row in sorted(rows, key=lambda one: (one["load"], one["num_samples"])):
        lines.append(
            f"{row['relay']:<15}{row['load']:<11}{row['num_samples']:>8,}{row['tokens_per_s']:>12,}"
            f"{row['cpu_us_per_token']:>10.2f}{_range(row):>15}{row['rss_bytes'] / 1e6:>7.0f}"
        )
    goals = result["goals"]
    lines += ["", "ours against the better of the two routers, CPU a token:"]
    for num, at in result["by_concurrency"].items():
        paced, full = at["ratio_to_best_router"]["paced"], at["ratio_to_best_router"]["saturated"]
        late = at["added_latency_ms"]
        lines.append(
            f"  {num:>5} samples: {_times(paced)} paced, {_times(full)} saturated; a group arrives "
            f"{late['p50']:.1f} ms (p99 {late['p99']:.1f}) after its last token was sent"
        )
    lines += [
        f"saturated, one core, journal on: {result['saturated_tokens_per_s']:,} tokens/s; goal "
        f"{goals['saturated_tokens_per_s']:,}",
        f"cost a token, most to least samples: {result['growth_256_to_4096']}; "
        f"goal below {goals['growth_256_to_4096']}",
        f"bytes a sample with its tokens: {result['bytes_per_sample']:,}; goal below {goals['bytes_per_sample']:,} "
        "without them",
    ]
    if result["cpu_us_per_token_by_answer_length"]:
        by = ", ".join(
            f"{cost} us at {length:,}" for length, cost in result["cpu_us_per_token_by_answer_length"].items()
        )
        lines.append(f"cost a token by length of answers: {by} tokens")
    lines += [f"missing: {what}: {why}" for what, why in result["missing"].items()]
    return lines


def _range(row: dict[str, Any]) -> str:
    least, most = row["cpu_us_per_token_range"]
    return f"{least:.2f}..{most:.2f}"


def _times(ratio: float | None) -> str:
    return "no router" if ratio is None else f"{ratio:g}x"
