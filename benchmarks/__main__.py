"""`make bench NAME=relay ARGS=--json`: run one of the benchmarks; without a NAME, list them."""

import importlib
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from polyrl.errors import EXIT_BAD_INPUT, UserError
from polyrl.run import event_loop


class Benchmark(NamedTuple):
    help: str
    time: str
    module: str


BENCHMARKS: Mapping[str, Benchmark] = {
    "relay": Benchmark(
        "the manager beside nginx, sglang-router and vllm-router, which it installs into a cache",
        "a quarter of an hour",
        "benchmarks.relay.compare",
    ),
    "engine": Benchmark(
        "the builtin engine beside transformers' continuous batching or the vLLM server (--peer)",
        "a minute",
        "benchmarks.engine",
    ),
    "served": Benchmark(
        "a vLLM or SGLang server straight, and through worker and manager", "three minutes", "benchmarks.served"
    ),
    "train": Benchmark("the trainer beside plain transformers loops", "two minutes", "benchmarks.train"),
    "small_step": Benchmark(
        "a step of the 90,000-parameter model beside TRL's GRPOTrainer", "a minute a seed", "benchmarks.small_step"
    ),
    "weights": Benchmark(
        "weight transfers beside iperf3 and mooncake; deltas; with root, late joiners in network namespaces",
        "five minutes",
        "benchmarks.weights.compare",
    ),
    "delta": Benchmark("deltas of optimizer steps beside a published codec", "a minute", "benchmarks.delta"),
    "markets": Benchmark(
        "the autoscaler on spot markets drawn anew, beside a fixed fleet and a greedy one",
        "minutes",
        "benchmarks.markets",
    ),
    "recovery": Benchmark(
        "how fast a manager that was killed has read its run again", "two minutes", "benchmarks.recovery"
    ),
    "checkpoints": Benchmark("seconds that a step waits until it is on disk", "a minute", "benchmarks.checkpoints"),
    "adaptive_timeout": Benchmark(
        "learned time limits of code rewards against a fixed one of 30 s, with real programs at a scaled clock",
        "two minutes",
        "benchmarks.adaptive_timeout",
    ),
    "dashboard": Benchmark(
        "the manager while pages look at its run, and while none does", "four minutes", "benchmarks.dashboard"
    ),
    "learning": Benchmark("reward over steps in every mode, five seeds each", "half an hour", "benchmarks.learning"),
    "time_to_reward": Benchmark(
        "seconds, tokens and dollars to the same accuracy in every mode, beside TRL's GRPOTrainer",
        "half an hour, of which learning's runs are the most",
        "benchmarks.time_to_reward",
    ),
    "smollm2": Benchmark(
        "SmolLM2-135M-Instruct learns sums, three seeds", "minutes a seed, on a GPU", "benchmarks.smollm2"
    ),
}


def main(argv: Sequence[str]) -> int:
    """Bad input is one line and exit code 2, as with `polyrl`."""
    if not argv:
        print("make bench NAME=... ARGS=..., with NAME one of:")
        width = max(map(len, BENCHMARKS))
        for name, one in BENCHMARKS.items():
            print(f"  {name:<{width}}  {one.help} ({one.time})")
        return 0
    name, *rest = argv
    try:
        if name not in BENCHMARKS:
            raise UserError(f"NAME: {name!r} is unknown; expected one of {', '.join(BENCHMARKS)}")
        return importlib.import_module(BENCHMARKS[name].module).main(rest)
    except UserError as error:
        print(f"bench: error: {error}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print(event_loop.LINE, file=sys.stderr)
        return event_loop.EXIT_INTERRUPTED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
