"""Workers as actors of a real Ray cluster of several nodes on this machine: the contract, and the death of a node."""

import asyncio
import importlib
import importlib.util
import os
import re
import signal
from collections.abc import Iterator
from typing import Any

import pytest

from polyrl.providers.contract import ProviderContract, is_there, order_of
from polyrl.providers.provider import Provider, ProviderRun
from polyrl.providers.ray_actors import RayProvider

pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'polyrl[ray]'"
    ),
]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    ray: Any = importlib.import_module("ray")
    cluster = importlib.import_module("ray.cluster_utils").Cluster(
        initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False}
    )
    cluster.add_node(num_cpus=2)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


class TestRay(ProviderContract):
    timeout_s = 60.0

    @pytest.fixture(autouse=True)
    def _on_a_cluster(self, cluster: Any) -> None:
        self.cluster = cluster

    def provider(self, run: ProviderRun) -> Provider:
        return RayProvider(run, address=self.cluster.address)

    async def kill(self, provider: Provider, run: ProviderRun, name: str) -> None:
        pid = re.search(r"process (\d+)", (await provider.held())[name].place)
        assert pid is not None
        os.kill(int(pid[1]), signal.SIGKILL)

    def test_a_node_that_joins_later_gets_workers_and_its_death_is_seen(self, run: ProviderRun, cluster: Any):
        async def scene(provider: Provider) -> None:
            names = ["worker-0", "worker-1", "worker-2"]
            for name in names:
                await provider.start(order_of(run, name))
            held = await self.until(provider, lambda held: sum(held[n].state == "running" for n in held) == 2)
            waiting = next(name for name in names if held[name].state == "starting")
            late = cluster.add_node(num_cpus=1)
            await self.until(provider, lambda held: held[waiting].state == "running")
            cluster.remove_node(late, allow_graceful=False)
            await self.until(provider, lambda held: not is_there(held, waiting))
            await provider.stop(names[0] if names[0] != waiting else names[1])
            await provider.start(order_of(run, waiting))
            await self.until(provider, lambda held: waiting in held and held[waiting].state == "running")
            await asyncio.sleep(0)

        self.play(run, scene)
