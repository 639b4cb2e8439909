"""Ranks on the machines of a Ray cluster, which one placement group reserves: a bundle for each machine.

    polyrl train recipe.toml --ranks 16 --nodes 2 --on ray

This process asks Ray for the places, and stays until the run is over. Everything else is as without Ray (nodes.py):
node zero is `polyrl train --nodes 2 --meet ...` on this machine, which has the recipe and the run's directory; each
other node is an actor in its bundle that runs `polyrl train --nodes 2 --node K --meet ...`. When its machine dies, Ray
starts the actor again on a machine that takes the place, and node zero waits for it.

Rules kept here: a process of a node ends with its actor, and node zero with this process. Places and actors go when the
run is over, whatever its end.
"""

import importlib
import importlib.util
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from polyrl.errors import UserError, one_line
from polyrl.parent import end_with_parent
from polyrl.run.processes import terminate_with_parent

_VISIBLE = "CUDA_VISIBLE_DEVICES"
_PIN = 0.001
"""Of the resource that every machine of Ray has for its own address."""
_WAIT_S = 600.0
_TELL_AFTER_S = 2.0


class RayNodes(NamedTuple):
    num: int
    ranks_each: int
    on_gpus: bool
    meet: str | None
    """HOST:PORT of this machine; None: the address that Ray knows, and a free port."""

    def bundles(self, here: str) -> list[dict[str, float]]:
        """Return what each machine is asked for; the first is this one."""
        each = {"CPU": float(self.ranks_each), **({"GPU": float(self.ranks_each)} if self.on_gpus else {})}
        return [{**each, f"node:{here}": _PIN}, *(dict(each) for _ in range(self.num - 1))]


class NodeActor:
    """The actor: it has the devices of its bundle, and runs the node's process unless that runs elsewhere."""

    def __init__(self, arguments: list[str]) -> None:
        self._process = None
        if arguments:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "polyrl", *arguments], stdin=subprocess.DEVNULL,
                start_new_session=True, preexec_fn=end_with_parent,  # noqa: PLW1509 (it calls prctl alone)
            )  # fmt: skip

    def devices(self) -> str:
        return os.environ.get(_VISIBLE, "")


def run_on_ray(wanted: RayNodes, arguments: Sequence[str]) -> int:
    """Run `polyrl train` with these arguments, which have neither nodes nor a place to meet, as node zero; and the
    other nodes where Ray has room. Returns the exit code. Raises UserError."""
    ray = _connected()
    host = ray.util.get_node_ip_address()
    meet = wanted.meet or f"{host}:{_free_port(host)}"
    over = ("--nodes", str(wanted.num), "--meet", meet)
    try:
        with _places(ray, wanted.bundles(host)) as group:
            theirs = [[], *(["train", *over, "--node", str(number)] for number in range(1, wanted.num))]
            actors = [_start(ray, wanted, group, number, its) for number, its in enumerate(theirs)]
            environment = {_VISIBLE: ray.get(actors[0].devices.remote())} if wanted.on_gpus else {}
            code = _run_here(["train", *arguments, *over], environment)
            for actor in actors:
                ray.kill(actor)
            return code
    finally:
        ray.shutdown()


def _connected() -> Any:
    if importlib.util.find_spec("ray") is None:
        raise UserError("--on ray: Ray is not installed; expected `pip install 'polyrl[ray]'`")
    ray: Any = importlib.import_module("ray")
    try:
        ray.init(address="auto", namespace="polyrl", log_to_driver=False, configure_logging=False)
    except Exception as error:
        raise UserError(f"--on ray: no cluster is reached ({one_line(error)}); expected one of `ray start`") from error
    return ray


def _free_port(host: str) -> int:
    with socket.socket() as one:
        one.bind((host, 0))
        return one.getsockname()[1]


@contextmanager
def _places(ray: Any, bundles: list[dict[str, float]]) -> Iterator[Any]:
    """Have a machine for each bundle, as soon as there are so many. Raises UserError if there never are."""
    groups: Any = importlib.import_module("ray.util.placement_group")
    group = groups.placement_group(bundles, strategy="STRICT_SPREAD")
    try:
        until, ready = time.monotonic() + _WAIT_S, group.ready()
        if not ray.wait([ready], timeout=_TELL_AFTER_S)[0]:
            print(f"waits for Ray to have {_show(bundles)}", flush=True)
            if not ray.wait([ready], timeout=until - time.monotonic())[0]:
                raise UserError(f"--on ray: within {_WAIT_S:.0f} s there were not {_show(bundles)}")
        yield group
    finally:
        groups.remove_placement_group(group)


def _show(bundles: list[dict[str, float]]) -> str:
    each = ", ".join(f"{amount:g} {kind}" for kind, amount in bundles[-1].items())
    return f"{len(bundles)} machines with {each} each, this one among them"


def _start(ray: Any, wanted: RayNodes, group: Any, number: int, arguments: list[str]) -> Any:
    strategies: Any = importlib.import_module("ray.util.scheduling_strategies")
    place = strategies.PlacementGroupSchedulingStrategy(placement_group=group, placement_group_bundle_index=number)
    taken = {"num_cpus": wanted.ranks_each, "num_gpus": wanted.ranks_each if wanted.on_gpus else 0}
    made: Any = ray.remote(NodeActor)
    return made.options(**taken, scheduling_strategy=place, max_restarts=-1).remote(arguments)


def _run_here(arguments: Sequence[str], environment: Mapping[str, str]) -> int:
    """Run node zero until it ends. A signal to this process is one to that."""
    process = subprocess.Popen(
        [sys.executable, "-m", "polyrl", *arguments], env={**os.environ, **environment},
        start_new_session=True, preexec_fn=terminate_with_parent,  # noqa: PLW1509  it takes no lock
    )  # fmt: skip
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    for number in before:
        signal.signal(number, lambda received, _: process.send_signal(received))
    try:
        return process.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if process.poll() is None:
            process.kill()
            process.wait()
