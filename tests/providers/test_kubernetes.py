"""Workers as Jobs of a stand-in API server whose pods are real processes: the contract, refusals, and manifests."""

import asyncio
import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.providers.kubernetes_api import POLYRL, TOKEN, ClusterApi, cluster_api

from polyrl.errors import ConfigError, UserError
from polyrl.providers.contract import SECRET, ProviderContract, order_of
from polyrl.providers.kubernetes import KubernetesProvider
from polyrl.providers.provider import Provider, ProviderError, ProviderRun
from polyrl.providers.registry import make_provider, run_of


@pytest.fixture(scope="module")
def api() -> Iterator[ClusterApi]:
    with cluster_api() as api:
        yield api


@pytest.fixture
def token_file(tmp_path: Path) -> str:
    (tmp_path / "account").write_text(TOKEN)
    return str(tmp_path / "account")


class TestKubernetes(ProviderContract):
    @pytest.fixture(autouse=True)
    def _on_a_cluster(self, api: ClusterApi, token_file: str) -> None:
        self.api, self.token_file = api, token_file

    def provider(self, run: ProviderRun) -> Provider:
        args = {"server": self.api.address, "token_file": self.token_file, "grace_s": 10}
        return KubernetesProvider(run, "polyrl:test", command=POLYRL, **args)

    async def kill(self, provider: Provider, run: ProviderRun, name: str) -> None:
        [pod] = [job for job, one in self.api.jobs.items() if one["metadata"]["labels"]["polyrl.dev/worker"] == name]
        os.kill(self.api.pods[pod].pid, signal.SIGKILL)

    def test_no_manifest_shows_the_token(self, run: ProviderRun):
        async def scene(provider: Provider) -> None:
            await provider.start(order_of(run, "worker-0"))
            assert SECRET not in json.dumps(self.api.jobs)

        self.play(run, scene)

    def test_a_refusal_is_one_line(self, run: ProviderRun, tmp_path: Path):
        wrong = tmp_path / "wrong"
        wrong.write_text("x")
        provider = KubernetesProvider(run, "polyrl:test", server=self.api.address, token_file=str(wrong))

        async def ask() -> None:
            try:
                await provider.held()
            finally:
                await provider.close()

        with pytest.raises(ProviderError, match=r"GET: 401: Unauthorized$"):
            asyncio.run(ask())


@pytest.mark.skipif(importlib.util.find_spec("kubernetes_validate") is None, reason="no kubernetes-validate")
def test_a_job_is_what_the_schema_of_kubernetes_wants(tmp_path: Path):
    import kubernetes_validate

    run = run_of(tmp_path / "A run!", ends_with_us=True)
    args = {"resources": {"memory": "64Gi"}, "node_selector": {"gpu": "h100"}, "service_account": "x", "gpus": 8}
    args |= {"claims": {"models": "/models"}}
    provider = KubernetesProvider(run, "polyrl:1", server="http://127.0.0.1:9", **args)
    job = provider.job(order_of(run, "Worker_1." + "x" * 50))
    assert len(job["metadata"]["name"]) <= 63
    kubernetes_validate.validate(job, "1.32", strict=True)


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({}, "image: missing"),
        ({"image": " "}, "image: is empty"),
        ({"image": "a", "grace_s": 0}, "grace_s: got 0"),
        ({"image": "a", "namespace": "No Name"}, "namespace: got 'No Name'"),
        ({"image": "a", "gpus": -1}, "gpus: got -1"),
        ({"image": "a", "claims": {"models": "models"}}, "claims.models: got 'models'"),
    ],
)
def test_a_setting_that_cannot_work_is_one_line(args: dict[str, object], why: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=f"fleet.provider_args.{why}"):
        make_provider("kubernetes", args, run_of(tmp_path, ends_with_us=True))


def test_outside_a_pod_a_server_is_wanted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    with pytest.raises(UserError, match="this is no pod"):
        make_provider("kubernetes", {"image": "a"}, run_of(tmp_path, ends_with_us=True)).check()


def answers(body: bytes) -> "asyncio.Server":
    """A server that says this to everybody."""

    async def say(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()

    return asyncio.start_server(say, "127.0.0.1", 0)  # type: ignore[return-value]


@pytest.mark.parametrize(
    "body",
    [b'{"items": [{"metadata": {"name": "\xff"}}]}', b'{"x":' + b"[" * 20_000 + b"]" * 20_000 + b"}", b"<html>", b"[]"],
    ids=["no text", "deep", "a page", "a list"],
)
def test_an_answer_that_is_not_of_kubernetes_is_tried_again(body: bytes, tmp_path: Path):
    async def ask() -> None:
        server = await answers(body)  # type: ignore[misc]
        port = server.sockets[0].getsockname()[1]
        provider = KubernetesProvider(
            run_of(tmp_path, ends_with_us=True), "polyrl:1", server=f"http://127.0.0.1:{port}"
        )
        try:
            with pytest.raises(ProviderError, match="an answer that is not of Kubernetes"):
                await provider.held()
        finally:
            await provider.close()
            server.close()

    asyncio.run(ask())


def test_labels_that_no_worker_has_are_nobody_and_words_of_the_cluster_are_safe_in_a_terminal(tmp_path: Path):
    def job(name: str) -> dict[str, object]:
        return {"metadata": {"name": "\x1b[2J", "labels": {"polyrl.dev/worker": name}}, "status": {"failed": 1}}

    body = json.dumps({"items": [job("../../x"), job("worker-0")]}).encode()

    async def ask() -> None:
        server = await answers(body)  # type: ignore[misc]
        port = server.sockets[0].getsockname()[1]
        provider = KubernetesProvider(
            run_of(tmp_path, ends_with_us=True), "polyrl:1", server=f"http://127.0.0.1:{port}"
        )
        try:
            held = await provider.held()
        finally:
            await provider.close()
            server.close()
        assert list(held) == ["worker-0"]
        assert held["worker-0"].place.isprintable()

    asyncio.run(ask())


def test_no_token_travels_in_the_clear(tmp_path: Path):
    run = run_of(tmp_path, ends_with_us=True)
    KubernetesProvider(run, "a", server="http://localhost:8001").check()
    with pytest.raises(UserError, match=r"server: got 'http://10\.0\.0\.1:8080'; expected https"):
        KubernetesProvider(run, "a", server="http://10.0.0.1:8080").check()
