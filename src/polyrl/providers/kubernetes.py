"""Workers as Kubernetes Jobs: one Job with one pod each, through the API with a small client of our own.

A Job is labelled with the run and the worker, and found again by these labels. Its name is made of both. The token is
in one Secret for the run, and comes as an environment variable: no manifest of a Job and no process list shows it.
Nothing is started again by Kubernetes: a pod that dies is a worker that has ended, and the keeper starts another.

Access: in a pod its service account; elsewhere `server` and `token_file`, or a proxy that signs in for you, like
`kubectl proxy` at http://127.0.0.1:8001. A kubeconfig is not read: it may name programs to run.
"""

import asyncio
import base64
import hashlib
import ipaddress
import os
import re
import ssl
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar
from urllib.parse import quote, urlsplit

import aiohttp
import msgspec

from polyrl.errors import ConfigError, UserError, one_line, plain, shorten
from polyrl.providers.provider import HeldState, HeldWorker, ProviderError, ProviderRun, WorkerOrder
from polyrl.wire.control import WORKER_NAME
from polyrl.wire.credentials import TOKEN_VARIABLE

_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_TIMEOUT_S = 30.0
_MAX_BYTES = 32 << 20
_MAX_JOBS = 10_000
_RUN_LABEL, _WORKER_LABEL = "polyrl.dev/run", "polyrl.dev/worker"
_EXIT_BAD_INPUT = 2
_NO_JSON = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
_NAME = r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?"


class _Meta(msgspec.Struct):
    name: str = ""
    labels: dict[str, str] = {}
    deletionTimestamp: str | None = None


class _Terminated(msgspec.Struct):
    exitCode: int = 0
    reason: str = ""


class _ContainerState(msgspec.Struct):
    terminated: _Terminated | None = None


class _Container(msgspec.Struct):
    state: _ContainerState = msgspec.field(default_factory=_ContainerState)


class _PodStatus(msgspec.Struct):
    phase: str = ""
    reason: str = ""
    containerStatuses: list[_Container] = []


class _PodSpec(msgspec.Struct):
    nodeName: str = ""


class _Pod(msgspec.Struct):
    metadata: _Meta
    spec: _PodSpec = msgspec.field(default_factory=_PodSpec)
    status: _PodStatus = msgspec.field(default_factory=_PodStatus)


class _JobStatus(msgspec.Struct):
    succeeded: int = 0
    failed: int = 0


class _Job(msgspec.Struct):
    metadata: _Meta
    status: _JobStatus = msgspec.field(default_factory=_JobStatus)


class _Jobs(msgspec.Struct):
    items: list[_Job] = []


class _Pods(msgspec.Struct):
    items: list[_Pod] = []


class KubernetesProvider:
    shares_files: ClassVar[bool] = False
    is_here: ClassVar[bool] = False

    def __init__(
        self,
        run: ProviderRun,
        image: str,
        namespace: str = "",
        server: str = "",
        token_file: str = "",
        ca_file: str = "",
        gpus: int = 0,
        resources: Mapping[str, str] | None = None,
        node_selector: Mapping[str, str] | None = None,
        claims: Mapping[str, str] | None = None,
        service_account: str = "",
        grace_s: int = 60,
        command: Sequence[str] = ("polyrl",),
    ) -> None:
        """`resources` are limits beside `gpus`, like {memory = "64Gi"}; `grace_s` is how long a pod that is ended has
        to hand over; `claims` are volumes by the name of their claim, mounted read-only at a path; `command` is how
        PolyRL is called in the image."""
        self._run, self._image, self._gpus, self._grace_s = run, image, gpus, grace_s
        self._resources, self._node_selector = dict(resources or {}), dict(node_selector or {})
        self._claims = dict(claims or {})
        self._account, self._command = service_account, tuple(command)
        self._server, self._token_file, self._ca_file = _place(server, token_file, ca_file)
        self._namespace = namespace or _read(_ACCOUNT / "namespace") or "default"
        self._session: aiohttp.ClientSession | None = None
        if not image.strip():
            raise ConfigError("fleet.provider_args.image: is empty; expected an image that has PolyRL in it")
        if not re.fullmatch(_NAME, self._namespace):
            raise ConfigError(f"fleet.provider_args.namespace: got {self._namespace!r}, expected a name like default")
        if not 1 <= grace_s <= 3600:
            raise ConfigError(f"fleet.provider_args.grace_s: got {grace_s}, expected seconds from 1 to 3600")
        if not 0 <= gpus <= 64:
            raise ConfigError(f"fleet.provider_args.gpus: got {gpus}, expected 0 to 64")
        for claim, path in self._claims.items():
            if not path.startswith("/"):
                raise ConfigError(f"fleet.provider_args.claims.{claim}: got {path!r}, expected a path like /models")

    def check(self) -> None:
        if not self._server:
            raise UserError(
                'fleet.provider = "kubernetes": this is no pod; expected fleet.provider_args.server, for example '
                "http://127.0.0.1:8001 of `kubectl proxy`"
            )
        if not self._server.startswith(("https://", "http://")):
            raise UserError(f"fleet.provider_args.server: got {self._server!r}, expected https://HOST:PORT")
        parts = urlsplit(self._server)
        if parts.scheme == "http" and not _is_this_machine(parts.hostname or ""):
            raise UserError(
                f"fleet.provider_args.server: got {self._server!r}; expected https, or a proxy on this machine: http "
                "shows the tokens to the network"
            )
        for key, file in (("token_file", self._token_file), ("ca_file", self._ca_file)):
            if file and not Path(file).is_file():
                raise UserError(f"fleet.provider_args.{key}: {file} is not there")

    async def held(self) -> Mapping[str, HeldWorker]:
        labelled = quote(f"{_RUN_LABEL}={self._run.id}")
        jobs = await self._call("GET", f"{self._jobs}?labelSelector={labelled}&limit={_MAX_JOBS}", kind=_Jobs)
        if not jobs.items:
            return {}
        pods = await self._call("GET", f"{self._api}/pods?labelSelector={labelled}&limit={_MAX_JOBS}", kind=_Pods)
        by_name = {one.metadata.labels.get(_WORKER_LABEL, ""): one for one in pods.items}
        held: dict[str, HeldWorker] = {}
        for job in jobs.items:
            name = job.metadata.labels.get(_WORKER_LABEL, "")
            if re.fullmatch(WORKER_NAME, name):
                held[name] = _show(name, job, by_name.get(name))
        return held

    async def start(self, order: WorkerOrder) -> None:
        held = (await self.held()).get(order.name)
        if held is not None and held.is_there:
            return
        if held is not None and held.state == "stopping":
            held = await self._until_gone(order.name)
        if held is not None:  # a Job that has ended is in the way of one with its name
            await self._delete(order.name)
        await self._put_token(order.token)
        await self._call("POST", self._jobs, self.job(order), fine=(409,))

    async def _until_gone(self, name: str) -> HeldWorker | None:
        """Wait for a worker that ends. Raises ProviderError if it does not."""
        deadline = time.monotonic() + self._grace_s + _TIMEOUT_S
        while (held := (await self.held()).get(name)) is not None and held.state == "stopping":
            if time.monotonic() > deadline:
                raise ProviderError(f"{held.place}: is still ending after {self._grace_s + _TIMEOUT_S:g} s")
            await asyncio.sleep(0.5)
        return held

    async def stop(self, name: str) -> None:
        """Stop its pod, which gets SIGTERM, and `grace_s` seconds."""
        await self._delete(name)

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
            self._session = None

    # Manifests

    def job(self, order: WorkerOrder) -> dict[str, Any]:
        """Return the Job of a worker."""
        labels = {_RUN_LABEL: self._run.id, _WORKER_LABEL: order.name, "app.kubernetes.io/name": "polyrl-worker"}
        secret = {"secretKeyRef": {"name": self._secret, "key": "token"}}
        limits = {**({"nvidia.com/gpu": str(self._gpus)} if self._gpus else {}), **self._resources}
        container = {
            "name": "worker",
            "image": self._image,
            "command": list(self._command),
            "args": list(order.arguments),
            "env": [
                {"name": TOKEN_VARIABLE, "valueFrom": secret},
                {"name": "POLYRL_GRACE_S", "value": str(self._grace_s)},
            ],
            "resources": {"limits": limits},
            "volumeMounts": [
                {"name": f"claim-{number}", "mountPath": path, "readOnly": True}
                for number, path in enumerate(self._claims.values())
            ],
        }
        pod = {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": self._grace_s,
            "automountServiceAccountToken": False,
            "containers": [container],
            "volumes": [
                {"name": f"claim-{number}", "persistentVolumeClaim": {"claimName": claim, "readOnly": True}}
                for number, claim in enumerate(self._claims)
            ],
            **({"nodeSelector": self._node_selector} if self._node_selector else {}),
            **({"serviceAccountName": self._account} if self._account else {}),
        }
        return {
            "apiVersion": "batch/v1",
            "kind": "Job",
            "metadata": {"name": self._name(order.name), "labels": labels},
            "spec": {"backoffLimit": 0, "template": {"metadata": {"labels": labels}, "spec": pod}},
        }

    def _name(self, worker: str) -> str:
        """Return a name of at most 63 letters; the digest tells apart what it cannot hold."""
        digest = hashlib.sha256(f"{self._run.id}/{worker}".encode()).hexdigest()[:8]
        return f"polyrl-{self._run.id[:32]}-{_plain_name(worker)}-{digest}"

    @property
    def _secret(self) -> str:
        return f"polyrl-{self._run.id}-token"

    async def _put_token(self, token: str) -> None:
        secret = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": self._secret, "labels": {_RUN_LABEL: self._run.id}},
            "data": {"token": base64.b64encode(token.encode()).decode()},
        }
        secrets = f"{self._api}/secrets"
        status = await self._status("POST", secrets, secret, fine=(409,))
        if status == 409:
            await self._status("PUT", f"{secrets}/{self._secret}", secret)

    # The API

    @property
    def _api(self) -> str:
        return f"/api/v1/namespaces/{self._namespace}"

    @property
    def _jobs(self) -> str:
        return f"/apis/batch/v1/namespaces/{self._namespace}/jobs"

    async def _delete(self, worker: str) -> None:
        options = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground",
        }  # it is listed until its pod is gone
        await self._status("DELETE", f"{self._jobs}/{self._name(worker)}", options, fine=(404,))

    async def _status(self, method: str, path: str, body: object, fine: tuple[int, ...] = ()) -> int:
        return (await self._request(method, path, body, fine))[0]

    async def _call(
        self, method: str, path: str, body: object = None, *, kind: type[Any] = dict, fine: tuple[int, ...] = ()
    ) -> Any:
        _, answer = await self._request(method, path, body, fine)
        try:
            return msgspec.json.decode(answer, type=kind)
        except _NO_JSON as error:
            raise ProviderError(f"{self._server}: an answer that is not of Kubernetes: {one_line(error)}") from error

    async def _request(self, method: str, path: str, body: object, fine: tuple[int, ...]) -> tuple[int, bytes]:
        """Raises ProviderError for whatever is neither a success nor `fine`."""
        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=_TIMEOUT_S))
        token = _read(Path(self._token_file)) if self._token_file else ""  # read anew: it is renewed
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        tls = ssl.create_default_context(cafile=self._ca_file) if self._ca_file else True
        data = None if body is None else msgspec.json.encode(body)
        headers |= {} if data is None else {"Content-Type": "application/json"}
        asking = self._session.request(
            method, self._server + path, data=data, headers=headers, ssl=tls, allow_redirects=False
        )
        try:
            async with asking as answer:
                content = bytearray()
                async for part in answer.content.iter_chunked(1 << 16):
                    content += part
                    if len(content) > _MAX_BYTES:
                        raise ProviderError(f"{self._server}: an answer of more than {_MAX_BYTES} bytes")
                if answer.status >= 300 and answer.status not in fine:
                    raise ProviderError(f"{self._server}: {method}: {answer.status}: {_message(bytes(content))}")
                return answer.status, bytes(content)
        except (aiohttp.ClientError, OSError, TimeoutError, ValueError) as error:
            raise ProviderError(f"{self._server}: {one_line(error) or type(error).__name__}") from error


def _place(server: str, token_file: str, ca_file: str) -> tuple[str, str, str]:
    """Return address, token and certificate: those given, or those of the pod that this is."""
    host = os.environ.get("KUBERNETES_SERVICE_HOST", "")
    if server or not host:
        return server.rstrip("/"), token_file, ca_file
    port = os.environ.get("KUBERNETES_SERVICE_PORT", "443")
    host = f"[{host}]" if ":" in host else host
    return f"https://{host}:{port}", token_file or str(_ACCOUNT / "token"), ca_file or str(_ACCOUNT / "ca.crt")


def _is_this_machine(host: str) -> bool:
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _plain_name(worker: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", worker.lower()).strip("-")[:12] or "worker"


def _read(file: Path) -> str:
    try:
        return file.read_text().strip()
    except OSError:
        return ""


def _message(content: bytes) -> str:
    try:
        said = msgspec.json.decode(content, type=dict[str, Any]).get("message", "")
    except _NO_JSON:
        said = content.decode(errors="replace")
    return shorten(plain(str(said)).replace("\n", " ")) or "it said nothing"


def _show(name: str, job: _Job, pod: _Pod | None) -> HeldWorker:
    place = f"job {job.metadata.name}" + (f" on {pod.spec.nodeName}" if pod is not None and pod.spec.nodeName else "")
    place = shorten(plain(place))
    if job.metadata.deletionTimestamp is not None:
        return HeldWorker(name, "stopping", place)
    phase = "Pending" if pod is None else pod.status.phase
    if job.status.succeeded or job.status.failed or phase in ("Succeeded", "Failed"):
        ends = [] if pod is None else [one.state.terminated for one in pod.status.containerStatuses]
        codes = [one.exitCode for one in ends if one is not None]
        why = f"exit code {codes[0]}" if codes else (pod.status.reason if pod is not None else "") or "its pod is gone"
        return HeldWorker(name, "ended", place, shorten(plain(why)), failed=codes[:1] == [_EXIT_BAD_INPUT])
    state: HeldState = "running" if phase == "Running" else "starting"
    return HeldWorker(name, state, place, "" if state == "running" else shorten(plain(f"pod: {phase}")))
