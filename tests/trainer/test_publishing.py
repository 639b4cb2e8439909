"""Offering weights: when whoever waits for it is cancelled, and with deltas that are made where the weights are."""

import asyncio
import logging
import threading
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from msgspec.structs import replace
from tests.trainer.small import save_small
from tests.weights.stage import SETTINGS, stage

from polyrl.trainer import publishing
from polyrl.trainer.model import Policy
from polyrl.trainer.publishing import Publishing
from polyrl.weights import delta, server, tensors
from polyrl.weights.peer import WeightPeer


class SlowServer:
    """Still writes when it is left."""

    def __init__(self) -> None:
        self.started, self.goes_on = threading.Event(), threading.Event()
        self.is_done = False

    def publish(self, *_: Any, **__: Any) -> None:
        self.started.set()
        self.goes_on.wait(5.0)
        self.is_done = True


def test_who_is_cancelled_while_weights_are_copied_leaves_when_they_are(tmp_path):
    async def scenario() -> None:
        server = SlowServer()
        publishing = Publishing(Policy.load(str(save_small(tmp_path))), cast("Any", server), None)
        publish = asyncio.create_task(publishing.publish(1))
        await asyncio.to_thread(server.started.wait, 5.0)
        publish.cancel()
        await asyncio.sleep(0.01)
        assert not publish.done()
        server.goes_on.set()
        await asyncio.wait((publish,))
        assert publish.cancelled()
        assert server.is_done

    asyncio.run(scenario())


class Fleet:
    """A policy that is published, and a worker that takes every version."""

    def __init__(self, folder: Path, served: server.WeightServer, worker: WeightPeer, *, encodes: bool) -> None:
        self.policy = Policy.load(str(save_small(folder)), dtype="bfloat16")
        self.server, self.worker = served, worker
        self.publishing = Publishing(self.policy, served, None, encodes=encodes)
        self.layout = tensors.layout_of(self.policy.published(), "bfloat16")
        self.version = 0

    def step(self) -> None:
        """One element in a hundred, by one unit in its last place."""
        for one in self.policy.published().values():
            bits = one.data.view(torch.int16).view(-1)
            bits[self.version :: 100] += 1
        self.version += 1

    def publish(self) -> tuple[str, int]:
        """The version's digest, and what was sent for it."""
        offer = asyncio.run(self.publishing.publish(self.version))
        assert self.server.wait_for_deltas(10)
        before = self.server.num_bytes_sent
        with self.worker.pull(offer.version, offer.digest, offer.addresses, 15) as copy:
            out = bytearray(self.layout.num_bytes)
            tensors.snapshot(self.policy.published(), self.layout, out)
            assert bytes(copy.view) == out
        return offer.digest, self.server.num_bytes_sent - before


@contextmanager
def fleet(tmp_path: Path, *, encodes: bool = True):
    with stage() as on:
        yield Fleet(tmp_path, on.server(), on.peer(), encodes=encodes)


def fail_with(error: Exception) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> None:
        raise error

    return fail


def test_deltas_of_the_device_are_those_of_the_host_and_the_host_makes_none(tmp_path, monkeypatch):
    def publish_four(folder: Path, *, encodes: bool) -> list[tuple[str, int]]:
        with fleet(folder, encodes=encodes) as found:
            published = []
            for _ in range(4):
                found.step()
                published.append(found.publish())
            return published

    by_host = publish_four(tmp_path / "host", encodes=False)
    monkeypatch.setattr(server.codec, "encode_piece", fail_with(AssertionError("the host is asked")))
    assert publish_four(tmp_path / "device", encodes=True) == by_host
    full, *deltas = [num_bytes for _, num_bytes in by_host]
    assert 0 < max(deltas) < full / 5


def test_a_device_without_room_leaves_deltas_to_the_host(tmp_path, monkeypatch, caplog):
    with fleet(tmp_path) as found, caplog.at_level(logging.WARNING, "polyrl.trainer"):
        found.step()
        _, full = found.publish()
        monkeypatch.setattr(publishing.GpuDeltaEncoder, "encode", fail_with(torch.OutOfMemoryError("no room")))
        for _ in range(2):
            found.step()
            assert found.publish()[1] < full / 5
    assert [one.getMessage().partition(":")[0] for one in caplog.records] == ["deltas are made on the host from now on"]


def test_after_a_publish_that_failed_the_device_holds_what_was_offered_again(tmp_path, monkeypatch):
    with fleet(tmp_path) as found:
        found.step()
        _, full = found.publish()
        found.step()
        with monkeypatch.context() as patch, pytest.raises(OSError, match="none left"):
            patch.setattr(server, "digests_of", fail_with(OSError("none left")))
            found.publish()
        for _ in range(3):  # the one that failed, and two more
            assert found.publish()[1] < full / 5
            found.step()


def test_what_changed_is_not_believed_of_a_version_of_another_layout():
    small, large = (tensors.layout_of({"x": torch.zeros(num)}) for num in (5000, 6000))
    wrong = delta.encode(bytes(small.num_bytes), b"\x01" * small.num_bytes, small)

    def fill(out: memoryview) -> delta.Encoded:
        out[:] = bytes(len(out))
        return wrong

    with stage() as on:
        served, worker = on.server(replace(SETTINGS, num_full=3)), on.peer()
        offers = [served.publish(version, layout, fill) for version, layout in enumerate((small, large, small))]
        assert served.wait_for_deltas(10)
        for offer in (offers[0], offers[2]):
            with worker.pull(offer.version, offer.digest, offer.addresses, 15) as copy:
                assert bytes(copy.view) == bytes(small.num_bytes)
                assert bool(copy.base) == (offer is offers[2])


def test_a_buffer_is_pinned_until_it_is_closed(monkeypatch):
    pinned: list[int] = []

    def pin(view: memoryview) -> bool:
        pinned.append(torch.frombuffer(view, dtype=torch.uint8).data_ptr())
        return True

    with stage() as on:
        monkeypatch.setattr(tensors, "pin", pin)
        monkeypatch.setattr(tensors, "unpin", pinned.remove)
        served = on.server(prepare=tensors.pin_buffer)
        for version in range(4):
            served.publish(version, tensors.layout_of({"x": torch.zeros(9)}), lambda _: None)
        assert len(set(pinned)) == 2, "one a buffer"
    assert not pinned
