"""A stand-in for the API server of Kubernetes: Jobs, pods and Secrets on loopback, whose pods are real processes here.

It checks what a real one checks of what we send (names, labels, an immutable Secret reference), answers as it does
(409 for what exists, 404 for what does not), and ends pods with SIGTERM and their grace period. It schedules nothing.
"""

import asyncio
import base64
import contextlib
import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from aiohttp import web

TOKEN = "of-the-service-account"


class ClusterApi:
    def __init__(self) -> None:
        self.jobs: dict[str, dict[str, Any]] = {}
        self.pods: dict[str, asyncio.subprocess.Process] = {}
        self.secrets: dict[str, dict[str, Any]] = {}
        self.address = ""
        self._ending: set[asyncio.Task[None]] = set()

    def routes(self) -> list[web.RouteDef]:
        jobs, core = "/apis/batch/v1/namespaces/default/jobs", "/api/v1/namespaces/default"
        return [
            web.get(jobs, self._list_jobs),
            web.post(jobs, self._create_job),
            web.delete(jobs + "/{name}", self._delete_job),
            web.get(core + "/pods", self._list_pods),
            web.post(core + "/secrets", self._create_secret),
            web.put(core + "/secrets/{name}", self._put_secret),
        ]

    @staticmethod
    @web.middleware
    async def authorized(request: web.Request, handler: Any) -> web.StreamResponse:
        if request.headers.get("Authorization") != f"Bearer {TOKEN}":
            return web.json_response({"kind": "Status", "message": "Unauthorized"}, status=401)
        return await handler(request)

    def _selected(self, request: web.Request) -> list[str]:
        key, _, value = request.query["labelSelector"].partition("=")
        return [name for name, job in self.jobs.items() if job["metadata"]["labels"].get(key) == value]

    def _state(self, name: str) -> dict[str, Any]:
        code = self.pods[name].returncode
        if code is None:
            return {"phase": "Running"}
        ended = {"terminated": {"exitCode": code if code >= 0 else 128 - code, "reason": "Error"}}
        return {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": [{"state": ended}]}

    async def _list_jobs(self, request: web.Request) -> web.Response:
        items = []
        for name in self._selected(request):
            code = self.pods[name].returncode
            status = {} if code is None else {"succeeded": 1} if code == 0 else {"failed": 1}
            items.append({**self.jobs[name], "status": status})
        return web.json_response({"kind": "JobList", "items": items})

    async def _list_pods(self, request: web.Request) -> web.Response:
        pods = [
            {
                "metadata": {"name": f"{name}-x", "labels": self.jobs[name]["spec"]["template"]["metadata"]["labels"]},
                "spec": {"nodeName": "n0"},
                "status": self._state(name),
            }
            for name in self._selected(request)
        ]
        return web.json_response({"kind": "PodList", "items": pods})

    async def _create_job(self, request: web.Request) -> web.Response:
        job = await request.json()
        name = job["metadata"]["name"]
        if not re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", name):
            return web.json_response({"message": f"Job {name!r} is invalid: metadata.name"}, status=422)
        if name in self.jobs:
            return web.json_response({"message": f'jobs.batch "{name}" already exists'}, status=409)
        [container] = job["spec"]["template"]["spec"]["containers"]
        environment = dict(os.environ)
        for one in container["env"]:
            environment[one["name"]] = one.get("value") or self._secret_of(one["valueFrom"]["secretKeyRef"])
        self.jobs[name] = job
        self.pods[name] = await asyncio.create_subprocess_exec(
            *container["command"], *container["args"], env=environment, start_new_session=True,
            stdout=asyncio.subprocess.DEVNULL, stderr=asyncio.subprocess.DEVNULL,
        )  # fmt: skip
        return web.json_response(job, status=201)

    def _secret_of(self, reference: dict[str, str]) -> str:
        return base64.b64decode(self.secrets[reference["name"]]["data"][reference["key"]]).decode()

    async def _delete_job(self, request: web.Request) -> web.Response:
        name = request.match_info["name"]
        if name not in self.jobs:
            return web.json_response({"message": f'jobs.batch "{name}" not found'}, status=404)
        self.jobs[name]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        grace_s = self.jobs[name]["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
        process = self.pods[name]
        if process.returncode is not None:
            del self.jobs[name], self.pods[name]
        else:
            self._ending.add(asyncio.create_task(self._end(name, process, grace_s)))
        return web.json_response({"kind": "Status", "status": "Success"})

    async def _end(self, name: str, process: asyncio.subprocess.Process, grace_s: float) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), grace_s)
        self.jobs.pop(name, None)
        self.pods.pop(name, None)

    async def _create_secret(self, request: web.Request) -> web.Response:
        secret = await request.json()
        if secret["metadata"]["name"] in self.secrets:
            return web.json_response({"message": "already exists"}, status=409)
        self.secrets[secret["metadata"]["name"]] = secret
        return web.json_response(secret, status=201)

    async def _put_secret(self, request: web.Request) -> web.Response:
        self.secrets[request.match_info["name"]] = await request.json()
        return web.json_response({})


@contextmanager
def cluster_api() -> Iterator[ClusterApi]:
    """Serve it from a thread of its own."""
    api, ready, loop = ClusterApi(), threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        application = web.Application(middlewares=[api.authorized])
        application.add_routes(api.routes())
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        api.address = site.name
        ready.set()
        await stop.wait()
        for process in list(api.pods.values()):
            if process.returncode is None:
                process.kill()
                await process.wait()
        await runner.cleanup()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()), daemon=True)
    thread.start()
    assert ready.wait(10)
    try:
        yield api
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(20)


POLYRL = (sys.executable, "-m", "polyrl")
