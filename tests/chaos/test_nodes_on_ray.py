"""A trainer whose second machine is one of a Ray cluster: the machine dies, Ray gives another, and the run goes on."""

import importlib
import importlib.util
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tests.chaos.test_nodes import ENVIRONMENT, last_step, read, recipe, until
from tests.chaos.test_resume import model
from tests.processes import children

from polyrl.cli.main import main
from polyrl.run.ray_nodes import RayNodes

__all__ = ["model"]
pytestmark = [
    pytest.mark.chaos,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        importlib.util.find_spec("ray") is None, reason="Ray is not installed: pip install 'polyrl[ray]'"
    ),
]


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two machines with a place for one rank each; the head has none."""
    ray: Any = importlib.import_module("ray")
    head = {"num_cpus": 0, "include_dashboard": False}
    cluster = importlib.import_module("ray.cluster_utils").Cluster(initialize_head=True, head_node_args=head)
    cluster.ours = [cluster.add_node(num_cpus=1) for _ in range(2)]
    ray.init(address=cluster.address, log_to_driver=False)
    try:
        yield cluster
    finally:
        ray.shutdown()
        cluster.shutdown()


def place_of_the_second(ray: Any) -> str:
    """The id of the machine that has bundle 1 of the only placement group."""
    tables = [one for one in ray.util.placement_group_table().values() if one["state"] == "CREATED"]
    return tables[0]["bundles_to_node_id"][1] if tables else ""


def test_a_machine_of_ray_that_dies_is_replaced_and_the_run_goes_on(model: Path, tmp_path: Path, cluster: Any):
    ray: Any = importlib.import_module("ray")
    run_dir, log = tmp_path / "run", tmp_path / "log"
    argv = (*recipe(model, run_dir, 500), "--ranks", "2", "--nodes", "2", "--on", "ray")
    environment = {**ENVIRONMENT, "RAY_ADDRESS": cluster.address}
    with log.open("wb") as sink:
        process = subprocess.Popen([sys.executable, "-m", "polyrl", *argv], stdout=sink, stderr=sink, env=environment)
    try:
        until(lambda: last_step(run_dir) >= 2 or process.poll() is not None, "no step was trained")
        assert process.poll() is None, read(log)[-3000:]
        where = place_of_the_second(ray)
        (dying,) = [one for one in cluster.ours if one.node_id == where]
        cluster.remove_node(dying, allow_graceful=False)
        cluster.add_node(num_cpus=1)
        until(lambda: "going on from step" in read(log) or process.poll() is not None, read(log)[-2000:], 60.0)
        line = next(one for one in read(log).splitlines() if "going on from step" in one)
        step = int(line.partition("going on from step ")[2].split()[0])
        until(lambda: last_step(run_dir) >= step + 2 or process.poll() is not None, "it did not go on")
        assert process.poll() is None, read(log)[-3000:]
        assert place_of_the_second(ray) not in ("", where)
        (zero,) = children(process.pid, "train")
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 130, read(log)[-2000:]
        assert not Path(f"/proc/{zero}").exists()
    finally:
        process.kill()
        process.wait()
    assert "Traceback" not in read(log)
    until(lambda: place_of_the_second(ray) == "", "its places are still taken", 30.0)


def test_what_ray_cannot_run_is_one_line(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    base = recipe(model, tmp_path / "run", 1)
    for more, why in (
        (["--on", "ray"], "--on ray: expected --nodes N"),
        (["--on", "ray", "--nodes", "2", "--node", "1"], "--on ray: expected --nodes N, how many machines, and no"),
        (["--on", "ray", "--nodes", "2", "--ranks", "3"], "train.ranks: 3 on 2 nodes; expected a multiple"),
        (["--on", "ray", "--nodes", "0"], "--nodes 0"),
        (["--on", "ray", "--nodes", "2", "--meet", "x"], "--meet: x; expected HOST:PORT"),
    ):
        assert main([*base, *more]) == 2, more
        errors = capsys.readouterr().err
        assert why in errors and errors.count("\n") == 1


def test_each_machine_is_asked_for_its_ranks_and_the_first_is_this_one():
    assert RayNodes(2, 4, True, None).bundles("10.0.0.1") == [
        {"CPU": 4.0, "GPU": 4.0, "node:10.0.0.1": 0.001},
        {"CPU": 4.0, "GPU": 4.0},
    ]
    assert RayNodes(2, 1, False, None).bundles("h")[1] == {"CPU": 1.0}
