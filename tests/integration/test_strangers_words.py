"""What a worker says of itself, in words and numbers, to a real manager: told as it is, bounded, and its own."""

import asyncio
import logging
from pathlib import Path

import msgspec
import pytest
from tests.integration.live import CONFIG, QUICK, Live, Peer, begin_round, honest_worker, manager, run, trainer

from polyrl.errors import UserError
from polyrl.ids import SampleId
from polyrl.journal.files import open_journals
from polyrl.journal.story import tell_story
from polyrl.manager.settings import LimitSettings
from polyrl.wire import frames

HOSTILE = "bye\n2026-01-01 polyrl.manager worker honest is refused: it lies\x1b[2J\x1b]0;owned\x07\u202etxet"


def test_words_of_a_worker_forge_no_line_of_a_log_or_a_story(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    samples: list[SampleId] = []

    async def scene() -> None:
        async with manager(tmp_path) as live, honest_worker(live), trainer(live) as fleet, Peer(live) as peer:
            playing, order = await begin_round(fleet, peer, 0)
            samples.append(SampleId(order.sample))
            await peer.say(frames.Down(HOSTILE), frames.Goodbye(HOSTILE))
            await playing
            status = await fleet.status()
            assert all(one.why.isprintable() for one in status.turned_away)

    with caplog.at_level(logging.INFO, logger="polyrl"):
        run(scene())
    said = [record.getMessage() for record in caplog.records]
    assert any("\\x1b[2J" in line and "mallory" in line for line in said), said
    assert all(line.isprintable() for line in said)
    lines = tell_story(open_journals(str(tmp_path)), samples[0])
    assert any("\\x1b[2J" in line for line in lines)
    assert all(line.isprintable() for line in lines)


async def joined(live: Live, name: str, **facts: float) -> Peer:
    peer = Peer(live, name)
    peer.facts = msgspec.structs.replace(peer.facts, **facts)
    try:
        await peer.enter()
    except BaseException:
        await peer.__aexit__()
        raise
    return peer


def test_a_price_that_the_operator_does_not_believe_is_refused_by_name(tmp_path: Path):
    async def scene() -> None:
        async with manager(tmp_path) as live, honest_worker(live), trainer(live) as fleet:
            await fleet.publish(0)
            with pytest.raises(UserError, match=r"worker 'greedy' says that it costs 1,000,000.00 US dollars an hour"):
                await joined(live, "greedy", price_usd_per_hour=1e6)
            status = await fleet.status()
            assert [one.name for one in status.workers] == ["honest"]
            assert status.refused == {"price": 1}
            assert status.ledger["usd"] < 1.0

    run(scene())


def test_a_start_is_paid_for_as_long_as_the_operator_says(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    limits = LimitSettings(request_timeout_s=1.0, max_price_usd_per_hour=10.0, max_starting_s=60.0)
    settings = msgspec.structs.replace(QUICK, limits=limits)

    async def scene() -> None:
        async with manager(tmp_path, settings) as live, trainer(live) as fleet:
            await fleet.publish(0)
            peer = await joined(live, "greedy", price_usd_per_hour=10.0, starting_s=1e6)
            try:
                await asyncio.sleep(0.1)
                assert (await fleet.status()).ledger["usd"] <= 10.0 * (60.0 + 20.0) / 3600
            finally:
                await peer.__aexit__()

    with caplog.at_level(logging.WARNING, logger="polyrl"):
        run(scene())
    assert "worker greedy says that it took 1e+06 s to start" in caplog.text
    assert CONFIG.trainer_usd_per_hour == 0.0
