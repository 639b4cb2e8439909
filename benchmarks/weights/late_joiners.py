"""One version to many workers behind links of their own: how long until all have it, and what the trainer sends.

Two ways: a chain, in which each worker pulls from the one before it, and a swarm, in which each knows all. Every worker
has pulled twice before: its buffers are there.
"""

import time
from contextlib import ExitStack
from typing import Any, Literal

from benchmarks.weights.star import Star, star, why_not
from polyrl.bench.nodes import Node
from polyrl.weights.settings import WeightSettings

GOALS = {"copies_sent": 1.5, "times_one_copy": 1.4}


def measure(num_workers: int, num_bytes: int, mbit_s: int) -> dict[str, Any]:
    """Skipped with the reason where there can be no such network."""
    if why_not():
        return {"skipped": why_not()}
    with star(num_workers + 1, mbit_s) as net, ExitStack() as stack:
        trainer, workers = _start(net, stack, num_bytes)
        result: dict[str, Any] = {"workers": num_workers, "mbit_s": mbit_s, "num_bytes": num_bytes}
        for _ in range(2):  # a worker has two buffers, which are made once
            _spread(trainer, workers, "swarm")
        one = _spread(trainer, workers[:1], "chain")
        result["one_copy_s"] = one["s"]
        for way in ("chain", "swarm"):
            found = _spread(trainer, workers, way)
            found["times_one_copy"] = round(found["s"] / one["s"], 2)
            result[way] = found
    return result


def _start(net: Star, stack: ExitStack, num_bytes: int) -> tuple[Node, list[Node]]:
    settings = WeightSettings(interfaces=("10.203.0.0/24",), num_deltas=0, shared_memory=False)
    trainer = stack.enter_context(Node("serve", settings, num_bytes, net.inside(0)))
    workers = [Node("pull", settings, index, net.inside(index + 1)) for index in range(len(net.machines) - 1)]
    return trainer, [stack.enter_context(worker) for worker in workers]


def _spread(trainer: Node, workers: list[Node], way: Literal["chain", "swarm"]) -> dict[str, Any]:
    offer = trainer.request(do="publish")
    start = time.perf_counter()
    for index, worker in enumerate(workers):
        others = [one.addresses[0] for one in workers if one is not worker]
        before = workers[index - 1].addresses if index else trainer.addresses
        addresses = before if way == "chain" else [*trainer.addresses, *others]
        worker.tell(version=offer["version"], digest=offer["digest"], addresses=addresses, deadline_s=120)
    said = [worker.hear() for worker in workers]
    took_s = time.perf_counter() - start
    errors = [one["error"] for one in said if one["error"]]
    if errors:
        raise RuntimeError(f"a worker of the bench has no weights: {errors[0]}")
    sent = trainer.request(do="tell")["num_bytes_sent"] - offer["num_bytes_sent"]
    cpu_s = sum(one["cpu_s"] for one in said)
    return {"s": round(took_s, 2), "copies_sent": round(sent / offer["num_bytes"], 3), "workers_cpu_s": round(cpu_s, 2)}
