"""A store: only verified chunks are read, and giving a blob up waits for its readers, but not for long."""

import threading
import time

import numpy as np
import pytest

from polyrl.weights.buffers import Buffer
from polyrl.weights.chunks import table_of
from polyrl.weights.protocol import Code, SourceRefused
from polyrl.weights.store import Blob, Store

DATA = bytes(range(250))
NAME = "ab" * 32


def never(why: str) -> None:
    raise AssertionError(f"a reader was cut: {why}")


def blob(*, complete: bool) -> Blob:
    buffer = Buffer(len(DATA))
    buffer.view[:] = DATA
    return Blob(NAME, "full", 3, b"manifest", table_of(DATA, 100), buffer, complete=complete)


def bits(data: bytes) -> list[int]:
    return np.unpackbits(np.frombuffer(data, np.uint8), bitorder="little").tolist()


def test_a_chunk_is_read_only_after_it_was_marked():
    store, one = Store(), blob(complete=False)
    store.add(one)
    with pytest.raises(SourceRefused) as no, store.lease(NAME, 2, 1, never):
        pass
    assert no.value.code is Code.NOT_YET
    store.mark(one, 2)
    with store.lease(NAME, 2, 1, never) as span:
        assert (span.start, span.num_bytes) == (200, 50)
    assert bits(store.have(NAME, 0, 0.0).right)[:3] == [0, 0, 1]


@pytest.mark.parametrize(("first", "count"), [(0, 0), (0, 4), (3, 1), (2**32 - 1, 2**32 - 1)])
def test_chunks_that_do_not_exist_are_refused(first, count):
    store = Store()
    store.add(blob(complete=True))
    with pytest.raises(SourceRefused) as no, store.lease(NAME, first, count, never):
        pass
    assert no.value.code is Code.NONSENSE


def test_who_waits_for_chunks_is_told_when_one_is_marked():
    store, one = Store(), blob(complete=False)
    store.add(one)
    known = store.have(NAME, 0, 5.0)
    assert bits(known.right)[:3] == [0, 0, 0]
    threading.Timer(0.05, store.mark, (one, 1)).start()
    start = time.monotonic()
    known = store.have(NAME, known.revision, 5.0)
    assert bits(known.right)[:3] == [0, 1, 0]
    assert time.monotonic() - start < 4
    assert store.have(NAME, known.revision, 0.01) == known


def test_what_is_on_its_way_from_the_trainer_is_said_until_it_is_there():
    store, one = Store(), blob(complete=False)
    store.add(one)
    store.mark(one, 0)
    store.claim(one, range(3), claimed=True)
    assert bits(store.have(NAME, 0, 0.0).claimed)[:3] == [0, 1, 1]
    store.mark(one, 1)
    assert bits(store.have(NAME, 0, 0.0).claimed)[:3] == [0, 0, 1]
    store.claim(one, range(2, 3), claimed=False)
    assert bits(store.have(NAME, 0, 0.0).claimed)[:3] == [0, 0, 0]


def test_a_blob_that_is_given_up_is_gone_for_everybody_at_once():
    store = Store()
    store.add(blob(complete=True))
    assert store.give_up(NAME, 0.0) is not None
    assert store.give_up(NAME, 0.0) is None
    for ask in (lambda: store.have(NAME, 0, 5.0), lambda: store.manifest_of(NAME)):
        with pytest.raises(SourceRefused) as no:
            ask()
        assert no.value.code is Code.GONE


def test_giving_up_waits_for_a_reader_who_ends_in_time():
    store, reading, through = Store(), threading.Event(), []
    store.add(blob(complete=True))

    def read() -> None:
        with store.lease(NAME, 0, 3, never):
            reading.set()
            time.sleep(0.05)
            through.append(True)

    threading.Thread(target=read).start()
    assert reading.wait(5)
    store.give_up(NAME, 5.0)
    assert through == [True]


def test_giving_up_cuts_a_reader_who_does_not():
    store, reading, cut = Store(), threading.Event(), threading.Event()
    store.add(blob(complete=True))

    def read() -> None:
        with store.lease(NAME, 0, 3, lambda why: cut.set()):
            reading.set()
            assert cut.wait(5)

    threading.Thread(target=read).start()
    assert reading.wait(5)
    store.give_up(NAME, 0.01)
    assert cut.is_set()
