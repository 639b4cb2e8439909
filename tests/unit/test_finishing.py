"""Work that goes on when whoever waits for it stops waiting."""

import asyncio
import gc
import logging

import pytest

from polyrl.engines.finishing import finish, finish_first


def test_what_it_brings_and_what_goes_wrong_is_told_to_who_waits():
    async def work(number: int) -> int:
        if number < 0:
            raise ValueError("too small")
        return number + 1

    for wait_for in (finish, finish_first):
        assert asyncio.run(wait_for(work(1))) == 2
        with pytest.raises(ValueError, match="too small"):
            asyncio.run(wait_for(work(-1)))


def test_it_goes_on_when_nobody_waits_any_more_and_a_failure_is_a_line_in_the_log(caplog):
    done: list[str] = []

    async def work(may_end: asyncio.Event, name: str) -> None:
        await may_end.wait()
        done.append(name)
        if name == "fails":
            raise ValueError("no room")

    async def scenario() -> None:
        may_end = asyncio.Event()
        waiting = [asyncio.create_task(finish(work(may_end, name))) for name in ("works", "fails")]
        await asyncio.sleep(0)
        for one in waiting:
            one.cancel()
        await asyncio.wait(waiting)
        assert all(one.cancelled() for one in waiting)
        assert not done
        may_end.set()
        while len(done) < 2:
            await asyncio.sleep(0)
        await asyncio.sleep(0)

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
        gc.collect()
    assert done == ["works", "fails"]
    assert [record.getMessage() for record in caplog.records if record.name != "asyncio"] == [
        "its caller no longer waited, and it failed: no room"
    ]
    assert "never retrieved" not in caplog.text


@pytest.mark.parametrize("fails", [False, True])
def test_who_must_not_leave_before_it_ends_is_cancelled_afterwards(caplog, *, fails: bool):
    async def scenario() -> None:
        may_end = asyncio.Event()

        async def work() -> None:
            await may_end.wait()
            if fails:
                raise ValueError("no room")

        waiting = asyncio.create_task(finish_first(work()))
        for _ in range(3):
            await asyncio.sleep(0)
            waiting.cancel()
            await asyncio.sleep(0)
        assert not waiting.done()
        may_end.set()
        await asyncio.wait((waiting,))
        assert waiting.cancelled()

    with caplog.at_level(logging.INFO):
        asyncio.run(scenario())
        gc.collect()
    assert ("it failed: no room" in caplog.text) is fails
    assert "never retrieved" not in caplog.text
