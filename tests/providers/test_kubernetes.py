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
