"""Workers as jobs of a real Slurm cluster of two nodes on this machine: the contract, and the death of a node."""

import asyncio
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.providers.slurm_cluster import SlurmCluster, slurm_cluster, why_not

from polyrl.errors import ConfigError
from polyrl.providers.contract import ProviderContract, is_there, order_of
from polyrl.providers.provider import Provider, ProviderRun
from polyrl.providers.registry import make_provider, run_of
from polyrl.providers.slurm import SlurmProvider

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    if missing := why_not():
        pytest.skip(missing)
    with slurm_cluster(tmp_path_factory.mktemp("slurm")) as cluster:
        yield cluster


class TestSlurm(ProviderContract):
    timeout_s = 60.0

    @pytest.fixture(autouse=True)
    def _on_a_cluster(self, cluster: SlurmCluster) -> None:
        self.cluster = cluster

    def provider(self, run: ProviderRun) -> Provider:
        return SlurmProvider(run)

    async def kill(self, provider: Provider, run: ProviderRun, name: str) -> None:
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                try:
                    words = (folder / "cmdline").read_bytes().split(b"\0")
                except OSError:
                    continue
                if b"--name" in words and name.encode() in words and str(run.folder).encode() in b" ".join(words):
                    os.kill(int(folder.name), signal.SIGKILL)

    def test_a_worker_whose_node_dies_runs_again_on_another_node(self, run: ProviderRun, cluster: SlurmCluster):
        async def scene(provider: Provider) -> None:
            await provider.start(order_of(run, "worker-0"))
            await self.until(provider, lambda held: held["worker-0"].state == "running")
            first = cluster.busy_node()
            cluster.kill_node(first)
            deadline = time.monotonic() + 90.0
            while cluster.busy_node() in ("", first):
                assert time.monotonic() < deadline, await provider.held()
                assert is_there(dict(await provider.held()), "worker-0"), "Slurm requeues it by itself"
                cluster.release_requeued()
                await asyncio.sleep(0.5)
            assert is_there(dict(await provider.held()), "worker-0")
            cluster.start_node(first)

        self.play(run, scene)


@pytest.mark.parametrize("option", ["--job-name=x", "--output=x", "gres=gpu:1"])
def test_an_option_that_is_not_the_users_is_one_line(option: str, tmp_path: Path):
    with pytest.raises(ConfigError, match=r"fleet\.provider_args\.sbatch: got"):
        make_provider("slurm", {"sbatch": [option]}, run_of(tmp_path, ends_with_us=True))
