"""Kill and cut whatever moves weights: every worker ends on a verified version, and the trainer never waits."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec
import pytest
from benchmarks.weights import late_joiners
from benchmarks.weights.star import star, why_not
from msgspec.structs import replace
from tests.weights.stage import SETTINGS, Faults, publish, pull, stage, weights

from polyrl.bench.nodes import KEY as NODE_KEY
from polyrl.bench.nodes import Node
from polyrl.weights.server import Offer
from polyrl.weights.settings import TransferError, WeightSettings

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]

NUM_ELEMENTS = 8_000_000
BIG = replace(SETTINGS, chunk_bytes=256 << 10, num_deltas=0)
NURSERY = Path(__file__).with_name("nursery.py")
NUM_KILLS = 200


class Worker:
    def __init__(self, pid: int, out: str) -> None:
        self.pid, self.out = pid, out

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)

    def read(self, what: str) -> dict | list:
        path, deadline = Path(f"{self.out}.{what}"), time.monotonic() + 60
        while not path.exists():
            assert time.monotonic() < deadline, f"{path} did not appear"
            time.sleep(0.005)
        return json.loads(path.read_text(encoding="utf-8"))


class Nursery:
    def __init__(self, folder: Path) -> None:
        self._folder, self._num = folder, 0
        self.pids: list[int] = []
        self.process = subprocess.Popen(
            [sys.executable, str(NURSERY)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def bear(self, offer: Offer, addresses: list[str], settings: WeightSettings = BIG) -> Worker:
        assert self.process.stdin is not None and self.process.stdout is not None
        self._num += 1
        out = str(self._folder / str(self._num))
        wish = {"out": out, "number": self._num, "settings": msgspec.to_builtins(settings), "addresses": addresses}
        self.process.stdin.write(json.dumps({**wish, "version": offer.version, "digest": offer.digest}) + "\n")
        self.process.stdin.flush()
        self.pids.append(json.loads(self.process.stdout.readline())["pid"])
        return Worker(self.pids[-1], out)


@contextmanager
def nursery(folder: Path) -> Iterator[Nursery]:
    one = Nursery(folder)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(10)


def left_behind(pids: list[int]) -> list[str]:
    """Processes of ours that live, and files of ours in shared memory. Other programs put theirs there too, and so does
    another `polyrl` that runs now: its scratch directory is not about weights."""
    living = [str(pid) for pid in pids if Path(f"/proc/{pid}").exists()]
    names = [name for name in sorted(os.listdir("/dev/shm")) if "polyrl" in name]
    return living + [name for name in names if not name.startswith("polyrl-scratch-")]


def test_workers_and_relays_killed_at_random_cost_the_others_a_retry(tmp_path):
    """200 kills. One of a pair, each a source of the other, dies somewhere in its pull; the other ends well."""
    rng = random.Random(5)
    longest_publish_s, num_midway = 0.0, 0
    span_s = 0.2
    """How late a kill may come: longer where most die in the middle of a pull, shorter where few do."""
    with nursery(tmp_path) as born, stage() as on:
        server = on.server(BIG)
        offer = publish(server, 1, NUM_ELEMENTS)
        for turn in range(NUM_KILLS):
            if turn % 10 == 9:
                start = time.monotonic()
                offer = publish(server, turn // 10 + 2, NUM_ELEMENTS)
                longest_publish_s = max(longest_publish_s, time.monotonic() - start)
            relay = born.bear(offer, list(offer.addresses))
            its = relay.read("addresses")
            assert isinstance(its, list)
            worker = born.bear(offer, [*its, *offer.addresses])
            victim, left = (relay, worker) if rng.random() < 0.5 else (worker, relay)
            time.sleep(rng.uniform(0.0, span_s))
            is_midway = not Path(f"{victim.out}.result").exists()
            num_midway += is_midway
            span_s = min(0.4, span_s * 1.05) if is_midway else max(0.002, span_s * 0.85)
            victim.kill()
            result = left.read("result")
            assert isinstance(result, dict)
            assert result.get("right") and result["digest"] == offer.digest, result
            assert not any(is_bad for _, is_bad in result["failures"]), result
            left.kill()
    assert num_midway > NUM_KILLS / 4, "too few died in the middle of a pull for this to say much"
    assert longest_publish_s < 10
    deadline = time.monotonic() + 10
    while left_behind(born.pids) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left_behind(born.pids) == []


def test_connections_cut_at_random_bytes_never_lose_or_spoil_a_version():
    """200 cuts, of full versions and of deltas."""
    rng = random.Random(7)
    settings = replace(SETTINGS, chunk_bytes=4096)
    num_cuts = version = 0
    with stage() as on:
        server, steady, late = on.server(settings), on.peer(0), on.peer(1)
        while num_cuts < NUM_KILLS:
            version += 1
            offer = publish(server, version)
            for peer, num_bytes in ((steady, 20_000), (late, 110_000)):
                if peer is late:
                    late.close()
                    peer = late = on.peer(1)
                once = rng.random() < 0.7
                wire = on.wire(offer.addresses[0], Faults(cut_at=rng.randrange(num_bytes), once=once))
                held = peer.held
                try:
                    assert pull(peer, offer, (wire.address,), 10) == weights(version)
                except TransferError as error:
                    assert not error.source_is_bad, error
                    assert peer.held == held
                    assert pull(peer, offer) == weights(version)
                wire.close()
                num_cuts += wire.faults.num_faults
                assert peer.held == (version, offer.digest)


def test_a_trainer_killed_at_random_leaves_its_workers_with_what_they_held():
    rng = random.Random(11)
    num_bytes = 64 << 20
    settings = replace(SETTINGS, chunk_bytes=1 << 20, num_deltas=0)
    node_settings = replace(settings, shared_memory=False)
    with stage() as on:
        peer = on.peer(settings=settings, key=NODE_KEY)
        for _ in range(12):
            with Node("serve", node_settings, num_bytes) as trainer:
                offer = trainer.request(do="publish")
                timer = threading.Timer(rng.uniform(0.0, 0.15), trainer.process.kill)
                timer.start()
                held = peer.held
                try:
                    peer.pull(offer["version"], offer["digest"], trainer.addresses, 20).close()
                    assert peer.held == (offer["version"], offer["digest"])
                except TransferError as error:
                    assert not error.source_is_bad, error
                    assert peer.held == held
                timer.join()
        with Node("serve", node_settings, num_bytes) as trainer:
            offer = trainer.request(do="publish")
            peer.pull(offer["version"], offer["digest"], trainer.addresses, 20).close()
            assert peer.held == (offer["version"], offer["digest"])


needs_network = pytest.mark.skipif(bool(why_not()), reason=why_not())


@needs_network
def test_workers_use_the_interface_that_they_are_assigned():
    """Two networks between two machines: an even worker's bytes come over the first, an odd one's over the second."""
    num_bytes = 16 << 20
    both = WeightSettings(interfaces=("10.203.0.0/24", "10.203.1.0/24"), num_deltas=0, shared_memory=False)
    with star(2, 1000, num_networks=2) as net, Node("serve", both, num_bytes, net.inside(0)) as trainer:
        hosts = [address.rpartition(":")[0] for address in trainer.addresses]
        assert hosts == [net.address(0, 0), net.address(0, 1)]
        offer = trainer.request(do="publish")
        for number in range(4):
            before = [net.received_bytes(1, network) for network in (0, 1)]
            with Node("pull", both, number, net.inside(1)) as worker:
                wish = {"version": offer["version"], "digest": offer["digest"], "deadline_s": 30}
                assert not worker.request(addresses=trainer.addresses, **wish)["error"]
            after = [net.received_bytes(1, network) for network in (0, 1)]
            moved = [now - then for now, then in zip(after, before, strict=True)]
            assert moved[number % 2] > num_bytes and moved[1 - number % 2] < num_bytes / 100


@needs_network
@pytest.mark.parametrize("way", ["chain", "swarm"])
def test_eight_late_joiners_cost_the_trainer_little_more_than_one_copy(late, way):
    """How long it takes is the bench's to say: here the cores are shared with other tests."""
    assert late[way]["copies_sent"] < 1.5
    assert late[way]["times_one_copy"] < 4


@pytest.fixture(scope="module")
def late() -> dict:
    return late_joiners.measure(8, 128 << 20, 1000)


@needs_network
def test_an_interface_that_cannot_be_reached_is_not_waited_for():
    num_bytes = 8 << 20
    both = WeightSettings(interfaces=("10.203.0.0/24", "10.203.1.0/24"), num_deltas=0, shared_memory=False)
    with star(2, 1000, num_networks=2) as net, Node("serve", both, num_bytes, net.inside(0)) as trainer:
        offer = trainer.request(do="publish")
        down = net.inside(0, "ip", "link", "set", "net1", "down")
        subprocess.run(down, check=True, timeout=20)
        only = replace(both, interfaces=("10.203.0.0/24",))
        with Node("pull", only, 1, net.inside(1)) as worker:
            wish = {"version": offer["version"], "digest": offer["digest"], "deadline_s": 30}
            said = worker.request(addresses=trainer.addresses, **wish)
            assert not said["error"] and said["took_s"] < 8
