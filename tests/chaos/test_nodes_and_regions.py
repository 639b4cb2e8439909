"""A trainer of two machines, six workers in two regions behind long links, and all that happens to them: a worker dies,
one joins late, one gets notice, a region is cut off for twenty seconds. The run trains what an undisturbed one does."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
from tests.chaos.regions import World, address, two_regions, why_not
from tests.chaos.test_nodes import ENVIRONMENT, last_step, read, recipe, started, until
from tests.chaos.test_resume import model
from tests.chaos.training_runs import end_of, polyrl, rewards

from polyrl.journal.files import open_journals
from polyrl.scheduling.core.events import WorkerJoined

__all__ = ["model"]
pytestmark = [pytest.mark.chaos, pytest.mark.timeout(900), pytest.mark.skipif(bool(why_not()), reason=why_not())]

MBIT_S = 100.0
NUM_STEPS = 25
CUT_S = 20.0
NOTICE_S = 10
PACED = (
    f"modules={Path(__file__).parent}",
    'rewards.functions=[{function="slow_rewards:slow",args={pause_s=0.1}}]',  # 1.6 s a step at least
)
FIRST = address("home", 0)
OVER_NODES = ("--nodes", "2", "--meet", f"{FIRST}:29500")


def undisturbed(model: Path, run_dir: Path) -> None:
    """On one machine, where rank zero's own worker writes all answers."""
    argv = recipe(model, run_dir, NUM_STEPS, "train.ranks=2", "train.local_generation=true", *PACED)
    subprocess.run([sys.executable, "-m", "polyrl", *argv], env=ENVIRONMENT, check=True, timeout=300)


class Far:
    """The run with its workers, and their processes by name."""

    def __init__(self, world: World, stack: ExitStack, model: Path, folder: Path) -> None:
        self.world, self.stack, self.model, self.folder = world, stack, model, folder
        self.run_dir = folder / "run"
        self.workers: dict[str, subprocess.Popen[bytes]] = {}

    def train(self) -> list[subprocess.Popen[bytes]]:
        """Both nodes, the first one first."""
        more = ("train.local_generation=false", f"manager.host={FIRST}", *PACED)
        argv = (*recipe(self.model, self.run_dir, NUM_STEPS, *more), *OVER_NODES, "--ranks", "2")
        nodes = [argv, ("train", *OVER_NODES, "--node", "1")]
        found = [self._start(("home", number), f"node{number}", argv) for number, argv in enumerate(nodes)]
        until((self.run_dir / "manager.json").exists, "there is no manager")
        return found

    def join(self, region: str, machine: int, *more: str) -> None:
        url = json.loads(read(self.run_dir / "manager.json"))["url"]
        name = f"{region}{machine}"
        joins = ("--join", url, "--token-file", str(self.run_dir / "worker.token"), "--name", name)
        argv = ("worker", "--engine", "builtin", "--model", str(self.model), *joins, "--region", region, *more)
        self.workers[name] = self._start((region, machine), name, argv)

    def _start(self, place: tuple[str, int], name: str, argv: tuple[str, ...]) -> subprocess.Popen[bytes]:
        whole = self.world.inside(*place, sys.executable, "-m", "polyrl", *argv)
        return self.stack.enter_context(started(whole, self.folder / f"{name}.log"))

    def after(self, step: int) -> None:
        until(lambda: last_step(self.run_dir) >= step, f"step {step} was not trained", 300.0)


def test_a_run_with_deaths_joins_notices_and_a_region_cut_off_trains_what_an_undisturbed_one_does(
    model: Path, tmp_path: Path
):
    undisturbed(model, tmp_path / "whole")
    with two_regions(MBIT_S) as world, ExitStack() as stack:
        run = Far(world, stack, model, tmp_path)
        first, second = run.train()
        for machine in range(3):
            run.join("eu", machine)
        run.join("us", 0)
        run.join("us", 1, "--notice", str(NOTICE_S))

        run.after(1)
        os.kill(run.workers["us0"].pid, signal.SIGKILL)
        run.join("us", 2)
        run.after(2)
        run.workers["us1"].send_signal(signal.SIGTERM)
        assert run.workers["us1"].wait(NOTICE_S + 5) == 0, read(tmp_path / "us1.log")[-2000:]
        run.after(3)
        world.cut("eu")
        time.sleep(CUT_S)
        world.heal("eu")

        assert first.wait(400) == 0, read(tmp_path / "node0.log")[-3000:]
        assert second.wait(60) == 0, read(tmp_path / "node1.log")[-3000:]
        for name in ("eu0", "eu1", "eu2", "us2"):  # they are told that the run is over
            assert run.workers[name].wait(60) == 0, read(tmp_path / f"{name}.log")[-2000:]
    assert "Traceback" not in read(tmp_path / "node0.log") + read(tmp_path / "node1.log")

    ledger = polyrl("ledger", str(run.run_dir), "--verify")
    said, _ = ledger.communicate(timeout=120)
    assert ledger.returncode == 0, said.decode()
    joined = Counter(
        str(record.event.worker)
        for _, records in open_journals(run.run_dir)
        for record in records
        if isinstance(record.event, WorkerJoined)
    )
    assert set(joined) == {"eu0", "eu1", "eu2", "us0", "us1", "us2"}
    assert max(joined["eu0"], joined["eu1"], joined["eu2"]) > 1, "nobody noticed that the region was cut off"

    assert rewards(run.run_dir) == rewards(tmp_path / "whole")
    found, expected = end_of(run.run_dir, NUM_STEPS), end_of(tmp_path / "whole", NUM_STEPS)
    assert found.keys() == expected.keys()
    apart = {name: float((found[name] - expected[name]).abs().max()) for name in expected if "/master/" in name}
    print(f"weights apart by {max(apart.values()):.1e}")
    assert max(apart.values()) < 1e-5, apart
