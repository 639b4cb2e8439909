"""One recipe on three kinds of fleets, by changing one key, and on each a node is killed in the middle: the run trains
what it trains with nobody disturbed."""

import importlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_nodes import ENVIRONMENT, last_step, read, until
from tests.chaos.test_resume import SETTINGS, model
from tests.chaos.training_runs import end_of, rewards
from tests.processes import children
from tests.providers.slurm_cluster import slurm_cluster, why_not

__all__ = ["model"]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_STEPS = 8
RECIPE = (*SETTINGS, f"train.steps={NUM_STEPS}", "train.local_generation=false", "fleet.workers=2")


class Disturbed:
    """A run, while it is disturbed."""

    def __init__(self, process: subprocess.Popen[bytes], run_dir: Path, log: Path) -> None:
        self.process, self.run_dir, self._log = process, run_dir, log

    def until(self, holds: Callable[[], bool], what: str) -> None:
        def is_so() -> bool:
            assert self.process.poll() is None, f"the run ended before: {what}\n{read(self._log)[-3000:]}"
            return holds()

        until(is_so, what, 120.0)


Kill = Callable[[Disturbed], None]


def start_local(_: ExitStack, __: Path) -> tuple[dict[str, str], Kill]:
    def kill(run: Disturbed) -> None:
        """This machine is the only node: all of its workers die."""
        for pid in children(run.process.pid, "worker"):
            os.kill(pid, signal.SIGKILL)

    return {}, kill


def start_slurm(stack: ExitStack, folder: Path) -> tuple[dict[str, str], Kill]:
    if missing := why_not():
        pytest.skip(missing)
    cluster = stack.enter_context(slurm_cluster(folder))

    def kill(run: Disturbed) -> None:
        cluster.kill_node(cluster.busy_node().split()[0])
        deadline = time.monotonic() + 250.0
        while run.process.poll() is None and time.monotonic() < deadline:
            cluster.release_requeued()
            time.sleep(0.5)

    return cluster.environment, kill


def start_ray(stack: ExitStack, _: Path) -> tuple[dict[str, str], Kill]:
    if importlib.util.find_spec("ray") is None:
        pytest.skip("Ray is not installed: pip install 'polyrl[ray]'")
    ray: Any = importlib.import_module("ray")
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = importlib.import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    stack.callback(cluster.shutdown)
    stack.callback(ray.shutdown)
    nodes = [cluster.add_node(num_cpus=1) for _ in range(2)]

    def kill(_: Disturbed) -> None:
        cluster.remove_node(nodes[0], allow_graceful=False)
        cluster.add_node(num_cpus=1)

    return {"RAY_ADDRESS": cluster.address}, kill


PROVIDERS = {"local": start_local, "slurm": start_slurm, "ray": start_ray}


def command(model: Path, run_dir: Path, *more: str) -> list[str]:
    given = (*RECIPE, f"model.path={model}", *more)
    return [sys.executable, "-m", "polyrl", "train", "arithmetic", *given, "--run-dir", str(run_dir)]


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("whole") / "run"
    subprocess.run(command(model, run_dir), env=ENVIRONMENT, check=True, timeout=300, capture_output=True)
    return run_dir


@pytest.mark.parametrize("provider", PROVIDERS)
def test_the_same_recipe_outlives_a_node_with_each_provider(provider: str, model: Path, whole: Path, tmp_path: Path):
    run_dir, log = tmp_path / "run", tmp_path / "log"
    with ExitStack() as stack:
        environment, kill = PROVIDERS[provider](stack, tmp_path / "cluster")
        sink = stack.enter_context(log.open("wb"))
        argv = command(model, run_dir, f"fleet.provider={provider}")
        process = subprocess.Popen(argv, stdout=sink, stderr=sink, env={**ENVIRONMENT, **environment})
        stack.callback(process.wait)
        stack.callback(process.kill)
        run = Disturbed(process, run_dir, log)
        run.until(lambda: last_step(run_dir) >= 2, "two steps are trained")
        began = time.monotonic()
        kill(run)
        assert process.wait(300) == 0, read(log)[-3000:]
        print(f"{provider}: over {time.monotonic() - began:.0f} s after a node died")
    verified = [sys.executable, "-m", "polyrl", "ledger", str(run_dir), "--verify"]
    assert subprocess.run(verified, capture_output=True, timeout=120, check=False).returncode == 0
    assert rewards(run_dir) == rewards(whole)
    found, expected = end_of(run_dir, NUM_STEPS), end_of(whole, NUM_STEPS)
    apart = [float((found[name] - expected[name]).abs().max()) for name in expected if "/master/" in name]
    assert max(apart) < 1e-5
