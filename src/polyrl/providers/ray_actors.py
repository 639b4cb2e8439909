"""Workers as Ray actors: one named, detached actor each, with the resources that it asks for.

Ray places an actor on a node that has the resources, and may start nodes for it where an autoscaler of Ray's runs. The
actor runs `polyrl worker` as a process of its node, which ends with the actor. An actor whose node dies is gone, and is
started again elsewhere by the keeper. The token travels as an argument of the actor, inside the cluster.

Ray's calls block, so they run in a thread each.
"""

import asyncio
import contextlib
import importlib
import importlib.util
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, TypeVar

from polyrl.errors import UserError, one_line
from polyrl.parent import end_with_parent
from polyrl.providers.provider import HeldWorker, ProviderError, ProviderRun, WorkerOrder
from polyrl.wire.credentials import TOKEN_VARIABLE

_NAMESPACE = "polyrl"
_STOP_S = 30.0
_LOOK_S = 10.0
T = TypeVar("T")


def _ray() -> Any:
    """Ray is an extra: nothing else here needs it."""
    return importlib.import_module("ray")


def _silence() -> None:
    """Keep Ray's own log out of the terminal: it would say with each try that no signal is handled in a thread."""
    its = logging.getLogger("ray")
    if not its.handlers:
        its.addHandler(logging.NullHandler())
    its.propagate = False


class WorkerActor:
    """The actor: a worker's process on its node."""

    def __init__(self, arguments: list[str], token: str, log_file: str) -> None:
        environment = {**os.environ, TOKEN_VARIABLE: token}
        try:
            output = open(log_file, "ab")  # noqa: SIM115 (closed below)
        except OSError:  # the node does not share the run's directory
            output = open(os.devnull, "ab")  # noqa: SIM115
        with output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "polyrl", *arguments], stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                env=environment, start_new_session=True, preexec_fn=end_with_parent,  # noqa: PLW1509 (it calls prctl alone)
            )  # fmt: skip

    def look(self) -> tuple[str, int, int | None]:
        """Return the node, the process, and its exit code if it has ended."""
        ray = _ray()
        node = ray.get_runtime_context().get_node_id()
        return node, self._process.pid, self._process.poll()

    def end(self, timeout_s: float) -> None:
        """Have the worker hand over and leave."""
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()


class RayProvider:
    shares_files: ClassVar[bool] = False
    is_here: ClassVar[bool] = False

    def __init__(
        self,
        run: ProviderRun,
        address: str = "auto",
        num_cpus: float = 1.0,
        num_gpus: float = 0.0,
        resources: Mapping[str, float] | None = None,
    ) -> None:
        """`address` is that of `ray start`; the others are what each worker takes of its node."""
        self._run, self._address = run, address
        self._options = {"num_cpus": num_cpus, "num_gpus": num_gpus, "resources": dict(resources or {})}

    def check(self) -> None:
        if importlib.util.find_spec("ray") is None:
            raise UserError("fleet.provider = \"ray\": Ray is not installed; expected `pip install 'polyrl[ray]'`")

    async def held(self) -> Mapping[str, HeldWorker]:
        return await self._in_thread(self._held)

    async def start(self, order: WorkerOrder) -> None:
        held = (await self.held()).get(order.name)
        if held is None or held.state == "ended":
            await self._in_thread(lambda: self._start(order))

    async def stop(self, name: str) -> None:
        await self._in_thread(lambda: self._stop(name))

    async def close(self) -> None:
        """Do nothing: the connection to Ray is the process', and ends with it."""

    # In threads

    async def _in_thread(self, do: Callable[[], T]) -> T:
        def connected() -> T:
            ray = _ray()
            if not ray.is_initialized():
                _silence()
                ray.init(address=self._address, namespace=_NAMESPACE, log_to_driver=False, configure_logging=False)
            return do()

        try:
            return await asyncio.to_thread(connected)
        except UserError:
            raise
        except Exception as error:
            raise ProviderError(f"Ray at {self._address}: {one_line(error)}") from error

    @property
    def _prefix(self) -> str:
        return f"polyrl/{self._run.id}/"

    def _held(self) -> dict[str, HeldWorker]:
        ray = _ray()
        listed: list[Any] = ray.util.list_named_actors(all_namespaces=True)
        names = [one["name"] for one in listed if one["namespace"] == _NAMESPACE]
        looks = {
            name.removeprefix(self._prefix): ray.get_actor(name, namespace=_NAMESPACE).look.remote()
            for name in names
            if name.startswith(self._prefix)
        }
        if looks:
            ray.wait(list(looks.values()), num_returns=len(looks), timeout=1.0)
        return {name: self._show(name, look) for name, look in looks.items()}

    def _show(self, name: str, look: Any) -> HeldWorker:
        ray = _ray()
        ready, _ = ray.wait([look], timeout=0)
        if not ready:
            return HeldWorker(name, "starting", "", "waits for a node with room")
        try:
            node, pid, code = ray.get(look, timeout=_LOOK_S)
        except (ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError) as error:
            return HeldWorker(name, "ended", "", one_line(error))
        if code is None:
            return HeldWorker(name, "running", f"node {node[:8]}, process {pid}")
        return HeldWorker(name, "ended", f"node {node[:8]}", f"exit code {code}", failed=code == 2)

    def _start(self, order: WorkerOrder) -> None:
        ray = _ray()
        self._kill(order.name)
        actor: Any = ray.remote(WorkerActor)
        options = {"name": f"{self._prefix}{order.name}", "namespace": _NAMESPACE, "lifetime": "detached"}
        actor = actor.options(**options, **self._options, max_restarts=0)
        actor.remote(list(order.arguments), order.token, str(order.log_file.absolute()))

    def _stop(self, name: str) -> None:
        ray = _ray()
        try:
            actor = ray.get_actor(f"{self._prefix}{name}", namespace=_NAMESPACE)
        except ValueError:
            return
        with contextlib.suppress(ray.exceptions.RayActorError, ray.exceptions.GetTimeoutError):
            ray.get(actor.end.remote(_STOP_S), timeout=_STOP_S + _LOOK_S)
        self._kill(name)

    def _kill(self, name: str) -> None:
        """Remove what is left of an actor whose worker has ended."""
        ray = _ray()
        with contextlib.suppress(ValueError, ray.exceptions.RayActorError):
            ray.kill(ray.get_actor(f"{self._prefix}{name}", namespace=_NAMESPACE), no_restart=True)
