"""A worker behind NAT: it dials out, and nothing can dial it. And one whose network goes away and comes back."""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from tests.chaos.namespaces import HOME_ADDRESS, MANAGER_ADDRESS, Namespaces, namespaces, why_not

POLYRL = (sys.executable, "-m", "polyrl")
DRIVE = Path(__file__).with_name("drive.py")
URL = f"http://{MANAGER_ADDRESS}:5000"
REACH_HOME = f"""
import errno, socket
try:
    socket.create_connection(({HOME_ADDRESS!r}, 5000), timeout=3)
except OSError as error:
    print(errno.errorcode.get(error.errno, error))
"""
ENGINE = ("speedup=3", "median_tokens=200", "slots=32")

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(180), pytest.mark.skipif(bool(why_not()), reason=why_not())]


@contextmanager
def program(argv: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    with log.open("ab") as sink:
        process = subprocess.Popen(argv, stdout=sink, stderr=sink)
    try:
        yield process
    finally:
        process.kill()
        process.wait(10)


def manager(net: Namespaces, folder: Path) -> list[str]:
    flags = ("--run-dir", str(folder / "run"), "--host", MANAGER_ADDRESS, "--verbose")
    return net.inside(net.public, *POLYRL, "manager", *flags)


def worker(net: Namespaces, folder: Path) -> list[str]:
    flags = ("--join", URL, "--token-file", str(folder / "run" / "worker.token"), "--name", "home")
    return net.inside(net.home, *POLYRL, "worker", *flags, *ENGINE)


def trainer(net: Namespaces, folder: Path, num_prompts: int, num_steps: int) -> subprocess.Popen[bytes]:
    token = str(folder / "run" / "admin.token")
    argv = net.inside(net.public, sys.executable, str(DRIVE), URL, token, str(num_prompts), str(num_steps))
    return subprocess.Popen(argv, stdout=subprocess.PIPE)


def until(path: Path) -> None:
    deadline = time.monotonic() + 60
    while not path.exists():
        assert time.monotonic() < deadline, f"{path} did not appear"
        time.sleep(0.05)


def lines(process: subprocess.Popen[bytes], timeout_s: float) -> list[dict]:
    said, _ = process.communicate(timeout=timeout_s)
    assert process.returncode == 0
    return [json.loads(line) for line in said.splitlines()]


def test_a_worker_behind_nat_joins_generates_and_is_drained(tmp_path):
    with namespaces() as net:
        inbound = net.inside(net.public, sys.executable, "-c", REACH_HOME)
        said = subprocess.run(inbound, capture_output=True, text=True, timeout=10, check=True)
        assert said.stdout.strip() == "ENETUNREACH"
        with program(manager(net, tmp_path), tmp_path / "manager.log"):
            until(tmp_path / "run" / "manager.json")
            with program(worker(net, tmp_path), tmp_path / "worker.log") as process:
                steps = lines(trainer(net, tmp_path, 8, 2), 60)
                assert [step["samples"] for step in steps] == [32, 32]
                assert steps[0]["workers"] == ["home"]
                drain = net.inside(net.public, *POLYRL, "drain", "home", "--run-dir", str(tmp_path / "run"))
                assert subprocess.run(drain, capture_output=True, timeout=20, check=False).returncode == 0
                assert process.wait(20) == 0


@pytest.mark.parametrize("away_s", [1.5, 8.0], ids=["shorter than a missed heartbeat", "given up meanwhile"])
def test_a_partitioned_worker_goes_on_when_the_network_heals(tmp_path, away_s):
    with namespaces() as net, program(manager(net, tmp_path), tmp_path / "manager.log"):
        until(tmp_path / "run" / "manager.json")
        with program(worker(net, tmp_path), tmp_path / "worker.log"):
            process = trainer(net, tmp_path, 16, 1)
            time.sleep(2.0)
            net.partition()
            time.sleep(away_s)
            net.heal()
            [step] = lines(process, 90)
            assert step["samples"] == 64
            assert bool(step["moves"]) == (away_s > 3.0)
