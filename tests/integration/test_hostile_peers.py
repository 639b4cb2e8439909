"""Peers that lie: each is refused with a reason and counted, and the honest worker beside it never notices.

Over real WebSockets first: a manager, an honest worker, a trainer, and a peer that holds leases and says what cannot
be. Then by the thousand, without sockets: bytes into the decoders, nonsense frames into a lobby.
"""

import asyncio
import contextlib
import math
import shutil
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import aiohttp
import msgspec
import pytest
from tests.chaos.fleet import expected_tokens
from tests.integration.live import (
    CONFIG,
    ENGINE,
    MODEL,
    QUICK,
    Fate,
    Live,
    Peer,
    begin_round,
    check_right,
    honest_worker,
    is_connected,
    manager,
    play_round,
    prompts_of,
    run,
    tokens,
    trainer,
    until,
)

from polyrl.client import Prompt, Sample
from polyrl.engines.emulated import EmulatedEngine
from polyrl.engines.engine import EngineInfo, Sink
from polyrl.errors import UserError
from polyrl.manager.journal import RunJournal
from polyrl.manager.peers import sessions
from polyrl.manager.service import Service
from polyrl.manager.settings import JournalSettings, ManagerSettings
from polyrl.scheduling.core.parameters import DomainData, FleetRules
from polyrl.wire import columns, frames
from polyrl.wire.control import MAX_SLOTS, AnswerRules, JoinReply, NameReply, RunReply, RunRequest
from polyrl.wire.dial import Dialer, NameTaken
from polyrl.worker.agent import WorkerAgent, WorkerOptions

SAMPLING = frames.Sampling()
Act = Callable[[Peer, frames.Order], Awaitable[None]]


class Scene:
    """What was seen of a peer that misbehaved beside an honest worker."""

    def __init__(self) -> None:
        self.fate = Fate("", None)
        self.refused: dict[str, int] = {}


async def beside_an_honest_worker(
    run_dir: Path, act: Act, *, stays: bool = False, answers: AnswerRules | None = None
) -> Scene:
    """One round, in which a peer gets half of the samples and then acts. The round must come out right."""
    scene = Scene()
    prompts: dict[int, Prompt] = {}
    async with (
        manager(run_dir) as live,
        honest_worker(live),
        trainer(live, answers=answers) as fleet,
        Peer(live) as peer,
    ):
        playing, order = await begin_round(fleet, peer, 0)
        prompts |= prompts_of(live)
        await act(peer, order)
        if not stays:
            scene.fate = await peer.fate()
        else:
            await peer.say(frames.Goodbye("the test is over"))
        check_right(await playing, prompts)
        scene.refused = live.refused
        assert (await fleet.status()).refused == scene.refused
    return scene


# Frames that are none


def deeply_nested() -> bytes:
    report = frames.encode(frames.Report(0, 0, 0.0, 0, 0.0))
    return bytes([report[0] + 1]) + report[1:] + b"\x91" * 100_000 + b"\xc0"


def cut_in_a_number() -> bytes:
    whole = tokens(1)
    return frames.encode(msgspec.structs.replace(whole, leases=whole.leases[:-1]))


NO_FRAMES = {
    "garbage": b"\xc1\x00garbage",
    "nothing": b"",
    "an unknown tag": frames.encode(["sing", 1]),
    "a manager's frame": frames.encode(frames.Ack(1)),
    "a trainer's frame": frames.encode(frames.Published(1, 1)),
    "a missing field": frames.encode(["tokens", 1]),
    "a negative number": frames.encode(["installed", -1]),
    "an engine that is back with less than nothing": frames.encode(["back", -2]),
    "a name that is not UTF-8": frames.encode(frames.Leaving("abc")).replace(b"abc", b"\xff\xfe\xfd"),
    "an array that claims four billion ends": frames.encode(tokens(1))[:-1] + b"\xdd\xff\xff\xff\xff",
    "arrays in arrays in arrays": deeply_nested(),
    "a report of an endless speed": frames.encode(frames.Report(0, 0, 0.5, 0, math.inf)),
    "a report that is not a number": frames.encode(frames.Report(0, 0, math.nan, 0, 1.0)),
}


@pytest.mark.parametrize("raw", NO_FRAMES.values(), ids=NO_FRAMES.keys())
def test_bytes_that_are_no_frame_are_refused(tmp_path: Path, raw: bytes):
    scene = run(beside_an_honest_worker(tmp_path, lambda peer, _: peer.send(raw)))
    assert scene.fate.why.startswith("refused: not a frame")
    assert scene.refused == {"frame": 1}


def test_a_tag_of_many_megabytes_costs_nobody_a_moment(tmp_path: Path):
    """The decoder's message has the tag whole; to write its control characters out would take seconds."""
    spent: list[float] = []

    async def act(peer: Peer, _order: frames.Order) -> None:
        raw = frames.encode(["\x00" * (14 << 20), 1])
        began = time.process_time()  # of the manager too, which is in this process
        await peer.send(raw)
        await peer.fate()
        spent.append(time.process_time() - began)

    scene = run(beside_an_honest_worker(tmp_path, act))
    assert scene.refused == {"frame": 1}
    assert spent[0] < 1.5


# Frames that cannot be true


def beginning(order: frames.Order) -> list[int]:
    """The two tokens that an honest engine writes first."""
    prompt = Prompt(columns.unpack_tokens(order.prompt))
    return expected_tokens(order.sample, prompt, CONFIG, ENGINE)[:2]


Lie = Callable[[frames.Order], frames.FromWorker]
LIES: dict[str, tuple[str, str, Lie]] = {
    "counts that do not add up": ("columns", "add up", lambda one: tokens(one.lease, count=2)),
    "a count of zero": ("columns", "without a token", lambda one: tokens(one.lease, ids=[], count=0)),
    "NaN": ("columns", "log-probability", lambda one: tokens(one.lease, logprobs=[math.nan])),
    "+infinity": ("columns", "log-probability", lambda one: tokens(one.lease, logprobs=[math.inf])),
    "-infinity": ("columns", "log-probability", lambda one: tokens(one.lease, logprobs=[-math.inf])),
    "a probability above 1": ("columns", "log-probability", lambda one: tokens(one.lease, logprobs=[0.5])),
    "NaN behind good ones": ("columns", "log-prob", lambda one: tokens(one.lease, ids=[7, 8], logprobs=[-1, math.nan])),
    "a token id below 0": ("columns", "token id", lambda one: tokens(one.lease, ids=[-1])),
    "half a lease": ("columns", "inside a number", lambda _: frames.Hello(0, b"\x01\x02\x03")),
    "tokens beyond the budget": ("budget", "more than 64", lambda one: tokens(one.lease, ids=[7] * 65)),
    "an offset beyond the budget": ("budget", "more than 64", lambda one: tokens(one.lease, offset=64)),
    "an offset below 0": ("budget", "more than 64", lambda one: tokens(one.lease, offset=0xFFFFFFFF)),
    "a gap": ("offset", "gap", lambda one: tokens(one.lease, offset=3)),
    "an end after more tokens than came": (
        "offset",
        "expected 2, which have come",
        lambda one: tokens(one.lease, ids=beginning(one), ended=(frames.Ended(one.lease, 5, "stop"),)),
    ),
    "an end after fewer tokens than came": (
        "offset",
        "expected 2, which have come",
        lambda one: tokens(one.lease, ids=beginning(one), ended=(frames.Ended(one.lease, 1, "length"),)),
    ),
    "an answer without a token": (
        "end",
        "without a token",
        lambda one: frames.NewTokens(1, b"", b"", b"", b"", b"", (frames.Ended(one.lease, 0, "stop"),)),
    ),
    "tokens of a version never published": ("version", "does not hold", lambda one: tokens(one.lease, version=7)),
    "tokens of version -1": ("version", "does not hold", lambda one: tokens(one.lease, version=-1)),
    "tokens of a lease never given": ("lease", "1 leases that were never", lambda _: tokens(1 << 40)),
    "an end of a lease never given": (
        "lease",
        "never given",
        lambda _: frames.NewTokens(1, b"", b"", b"", b"", b"", (frames.Ended(1 << 40, 0, "handed_over"),)),
    ),
    "a version never published": ("version", "never published", lambda _: frames.Installed(7)),
}


@pytest.mark.parametrize("name", LIES)
def test_what_cannot_be_true_is_refused(tmp_path: Path, name: str):
    kind, words, lie = LIES[name]
    scene = run(beside_an_honest_worker(tmp_path, lambda peer, order: peer.say(lie(order))))
    assert scene.fate.why.startswith("refused: ")
    assert words in scene.fate.why and "expected" in scene.fate.why
    assert scene.refused == {kind: 1}


"""Of the model that the emulated engine would have."""


def whole(order: frames.Order) -> list[int]:
    """The answer that an honest engine gives."""
    return expected_tokens(order.sample, Prompt(columns.unpack_tokens(order.prompt)), CONFIG, ENGINE)


def ending(order: frames.Order, ids: list[int], reason: frames.EndReason) -> frames.NewTokens:
    return tokens(order.lease, ids=ids, ended=(frames.Ended(order.lease, len(ids), reason),))


NO_ANSWERS: dict[str, tuple[str, str, Lie]] = {
    "the first id beyond the vocabulary": (
        "columns",
        "token id 32000; expected 0 to 31999, the vocabulary's",
        lambda one: tokens(one.lease, ids=[7, ENGINE.vocab]),
    ),
    "the largest id there is": ("columns", "token id 2147483647", lambda one: tokens(one.lease, ids=[2**31 - 1])),
    "a log-probability of -3e38": ("columns", "of -3e+38", lambda one: tokens(one.lease, logprobs=[-3e38])),
    "a log-probability of -101": ("columns", "of -101", lambda one: tokens(one.lease, logprobs=[-101.0])),
    "an answer cut off before the cap": (
        "end",
        "cut off after 2 tokens; expected 64",
        lambda one: ending(one, beginning(one), "length"),
    ),
    "a stop with a token that ends nothing": (
        "end",
        "which ends none; expected one of (2,)",
        lambda one: ending(one, beginning(one), "stop"),
    ),
}


@pytest.mark.parametrize("name", NO_ANSWERS)
def test_what_the_model_cannot_have_written_is_refused(tmp_path: Path, name: str):
    kind, words, lie = NO_ANSWERS[name]
    scene = run(beside_an_honest_worker(tmp_path, lambda peer, order: peer.say(lie(order)), answers=MODEL))
    assert scene.fate.why.startswith("refused: ")
    assert words in scene.fate.why and "expected" in scene.fate.why
    assert scene.refused == {kind: 1}


def test_an_id_beyond_the_vocabulary_is_refused_in_the_midst_of_a_stride_too(tmp_path: Path):
    """Frames that go on from each other are taken by their columns, on a path of their own."""

    async def act(peer: Peer, order: frames.Order) -> None:
        honest = whole(order)
        for number, one in enumerate(honest[:3]):
            await peer.say(tokens(order.lease, offset=number, ids=[one]))
        await peer.say(tokens(order.lease, offset=3, ids=[40_000]))

    scene = run(beside_an_honest_worker(tmp_path, act, answers=MODEL))
    assert "token id 40000" in scene.fate.why
    assert scene.refused == {"columns": 1}


async def says_text(peer: Peer, _: frames.Order) -> None:
    await peer.socket.send_str("hello")


async def says_too_much(peer: Peer, _: frames.Order) -> None:
    with contextlib.suppress(ConnectionError):  # it is cut off before it has said all
        await peer.send(bytes(2 * frames.MAX_WORKER_FRAME_BYTES))


@pytest.mark.parametrize(("act", "codes"), [(says_text, (1003,)), (says_too_much, (1009, 1006))])
def test_a_message_that_no_frame_can_be_breaks_the_connection(tmp_path: Path, act: Act, codes: tuple[int, ...]):
    scene = run(beside_an_honest_worker(tmp_path, act))
    assert scene.fate.code in codes
    assert scene.refused == {"frame": 1}


# Leases that are not theirs


def test_tokens_for_anothers_lease_go_nowhere_now_and_after_a_restart(tmp_path: Path):
    async def act(peer: Peer, order: frames.Order) -> None:
        lobby = peer.live.service.lobby
        for lease in range(order.lease, lobby.need_run().desk.state.next_lease):
            if lease not in {one.lease for one in peer.orders}:
                for offset in range(8):  # wherever the honest worker is, one of them would fit
                    await peer.say(tokens(lease, offset=offset, ended=(frames.Ended(lease, offset + 1, "stop"),)))
        await until(lambda: lobby.refused["late_lease"] >= 16, "they were heard")
        assert lost_in_a_restart(tmp_path, peer.live) == {}

    scene = run(beside_an_honest_worker(tmp_path / "run", act, stays=True))
    assert list(scene.refused) == ["late_lease"]


def test_what_comes_after_the_end_of_a_lease_goes_nowhere_now_and_after_a_restart(tmp_path: Path):
    async def act(peer: Peer, order: frames.Order) -> None:
        over = frames.Ended(order.lease, 2, "handed_over")
        await peer.say(tokens(order.lease, ids=beginning(order), ended=(over,)))
        await peer.hear(frames.Ack)
        await peer.say(tokens(order.lease, offset=2, ids=[1, 2, 3], ended=(frames.Ended(order.lease, 5, "stop"),)))
        await until(lambda: peer.live.refused == {"late_lease": 2}, "the replay was heard")
        assert lost_in_a_restart(tmp_path, peer.live) == {}

    run(beside_an_honest_worker(tmp_path / "run", act, stays=True))


def lost_in_a_restart(folder: Path, live: Live) -> dict[int, tuple[frames.SamplePayload, frames.SamplePayload]]:
    """Samples whose text would be another one if the manager died now: what they are, and what they would be."""
    lobby = live.service.lobby
    lobby.commit()
    shutil.copytree(live.service.run_dir, folder / "copy")
    again = Service(folder / "copy", live.service.settings)
    again.close()
    assert lobby.need_run().payload.tokens
    pairs = {
        one: (lobby.need_run().payload.answer(one), again.lobby.need_run().payload.answer(one))
        for one in lobby.need_run().payload.tokens
    }
    return {one: pair for one, pair in pairs.items() if pair[0] != pair[1]}


def test_an_end_of_a_lease_that_it_does_not_have_ends_nothing(tmp_path: Path):
    async def act(peer: Peer, _: frames.Order) -> None:
        scheduler = peer.live.service.lobby.need_run().scheduler
        others = set(range(scheduler.desk.state.next_lease)) - {one.lease for one in peer.orders}
        ends = tuple(frames.Ended(lease, 0, "engine_failed") for lease in sorted(others)[:3])
        await peer.say(frames.NewTokens(1, b"", b"", b"", b"", b"", ends))
        await peer.hear(frames.Ack)

    scene = run(beside_an_honest_worker(tmp_path, act, stays=True))
    assert scene.refused == {"late_lease": 3}


def test_an_end_that_is_a_lie_is_not_in_the_journal_and_what_came_with_it_is(tmp_path: Path):
    async def act(peer: Peer, order: frames.Order) -> None:
        lobby = peer.live.service.lobby
        lie = frames.Ended(order.lease, 5, "stop")
        await peer.say(tokens(order.lease, ids=beginning(order), ended=(lie,)))
        await until(lambda: lobby.refused["offset"] == 1, "it was heard")
        assert lost_in_a_restart(tmp_path, peer.live) == {}
        written = RunJournal(tmp_path / "copy", JournalSettings()).recover()
        assert written is not None
        said = [frame for one in written.payload if isinstance(one, list) for frame in one]
        its_own = columns.pack_column("<u8", [order.lease])
        (with_it,) = (one for one in said if one.leases == its_own)
        assert with_it.ended == ()

    run(beside_an_honest_worker(tmp_path / "run", act))


def test_a_flood_of_leases_is_refused_before_they_are_looked_up(tmp_path: Path):
    async def act(peer: Peer, order: frames.Order) -> None:
        num = 100_000
        flood = frames.NewTokens(
            1,
            columns.pack_column("<u8", [order.lease] * num),
            columns.pack_column("<u4", [0] * num),
            columns.pack_column("<u4", [1] * num),
            columns.pack_column("<i4", [0] * num),
            columns.pack_cells([7] * num, [-1.0] * num),
        )
        await peer.say(flood)

    scene = run(beside_an_honest_worker(tmp_path, act))
    assert scene.fate.why == "refused: news of 100000 leases in one frame; expected few, since it had 4 at once"
    assert scene.refused == {"lease": 1}


FLOODS: dict[str, tuple[frames.FromWorker, ...]] = {
    "reports": (frames.Report(0, 0, 0.0, 0, 0.0),),
    "failed installs": (frames.InstallFailed(0, "x" * 1900),),
    "outages": (frames.Down("x" * 1900),),
    "outages and ends of them": (frames.Down("x" * 1900), frames.Back(-1)),
    "notices": (frames.Leaving("x" * 1900, 5000.0), frames.Leaving("x" * 1900, 6000.0)),
}


@pytest.mark.parametrize("name", FLOODS)
def test_a_flood_of_small_frames_is_refused_and_fills_neither_journal_nor_log(
    tmp_path: Path, name: str, caplog, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(sessions, "_MOST_SMALL_FRAMES", 60)  # ten times that at ten beats a second

    async def act(peer: Peer, _order: frames.Order) -> None:
        with contextlib.suppress(ConnectionError):  # it is cut off before it has said all
            for _ in range(3000 // len(FLOODS[name])):
                await peer.say(*FLOODS[name])

    scene = run(beside_an_honest_worker(tmp_path, act))
    assert scene.fate.why.startswith(("refused: too many frames within a heartbeat", "refused: too much news"))
    assert "; expected 600 at once at most" in scene.fate.why
    assert scene.refused.pop("flood") == 1
    assert set(scene.refused) <= {"late_news"}
    assert len(caplog.records) < 30
    assert sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()) < 1 << 20


WIDE = "\U0001f600" * 2000
"""As many bytes as the reason of a frame can have."""
NEWS: dict[str, tuple[frames.FromWorker, ...]] = {
    "notices": (frames.Leaving(WIDE, 5000.0), frames.Leaving(WIDE, 6000.0)),
    "outages and ends of them": (frames.Down(WIDE), frames.Back(-1)),
    "that it leaves": (frames.Leaving(WIDE),),
    "a version that it has": (frames.Installed(0),),
}


@pytest.mark.parametrize("name", NEWS)
def test_a_worker_that_comes_again_and_again_with_news_fills_neither_journal_nor_log(
    tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
):
    """Whatever is allowed within one life is allowed once a join: twenty times a second."""
    num_lives = 10

    async def scene() -> None:
        async with manager(tmp_path, ManagerSettings()) as live, trainer(live) as fleet:
            await fleet.publish(0)
            for life in range(num_lives):
                async with Peer(live, f"mallory-{life}") as peer:
                    await peer.enter()
                    with contextlib.suppress(ConnectionError):
                        for _ in range(290 // len(NEWS[name])):
                            await peer.say(*NEWS[name])
                        await peer.say(frames.Goodbye(WIDE))
                    await peer.fate()

    run(scene())
    assert sum(one.stat().st_size for one in tmp_path.rglob("*.bin")) < num_lives * 16_000
    assert sum(len(one.getMessage().encode()) for one in caplog.records) < num_lives * 16_000


def test_a_change_of_duty_of_a_worker_without_duties_is_refused(tmp_path: Path):
    scene = run(beside_an_honest_worker(tmp_path, lambda peer, _: peer.say(frames.OnDuty("training"))))
    assert (
        scene.fate.why == "refused: a change of duty; expected none, since only the trainer's own workers have duties"
    )


def rows(leases: list[int], count: int) -> frames.NewTokens:
    """So many tokens of each of these leases, from their beginning."""
    num = len(leases)
    return frames.NewTokens(
        1,
        columns.pack_column("<u8", leases),
        columns.pack_column("<u4", [0] * num),
        columns.pack_column("<u4", [count] * num),
        columns.pack_column("<i4", [0] * num),
        columns.pack_cells([7] * count, [-1.0] * count) * num,
    )


VAIN: dict[str, Callable[[int], frames.NewTokens]] = {
    "tokens of a lease that is over": lambda over: rows([over] * 60, 64),
    "ends of leases that are over": lambda over: frames.NewTokens(
        1, b"", b"", b"", b"", b"", tuple(frames.Ended(over, 0, "stop") for _ in range(60))
    ),
    "frames of nothing": lambda _: frames.NewTokens(1, b"", b"", b"", b"", b""),
}


@pytest.mark.parametrize("name", VAIN)
def test_a_flood_of_tokens_that_bring_nothing_is_refused(tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch):
    """They are looked up, and go nowhere: nobody would notice, but the others wait meanwhile."""
    monkeypatch.setattr(sessions, "_MOST_SMALL_FRAMES", 20)

    async def act(peer: Peer, order: frames.Order) -> None:
        over = frames.Ended(order.lease, 2, "engine_failed")
        await peer.say(tokens(order.lease, ids=beginning(order), ended=(over,)))
        with contextlib.suppress(ConnectionError):  # it is cut off before it has said all
            for _ in range(3000):
                await peer.say(VAIN[name](order.lease))

    scene = run(beside_an_honest_worker(tmp_path, act))
    expected = "expected 200 frames of them at once at most"
    assert scene.fate.why == f"refused: too many tokens of leases that are over; {expected}"
    assert scene.refused.pop("flood") == 1
    assert set(scene.refused) <= {"late_lease"}
    assert scene.refused.get("late_lease", 0) < 60 * 600


# Samples that they do not want, or keep

MANY = msgspec.structs.replace(CONFIG, domains=(DomainData(name="d", prompts_per_step=8, num_prompts=50),))


async def hand_everything_over(peer: Peer) -> list[int]:
    """Answer every order with a hand-over that nobody asked for, until the connection ends. Returns whose they were."""
    returned: list[int] = []
    with contextlib.suppress(TypeError, ConnectionError):  # the connection was closed
        while True:
            for order in (await peer.hear(frames.Orders)).orders:
                returned.append(order.sample)
                num = len(order.so_far) // 4
                ended = (frames.Ended(order.lease, num, "handed_over"),)
                await peer.say(frames.NewTokens(1, b"", b"", b"", b"", b"", ended))
    return returned


def test_a_worker_that_hands_everything_over_unasked_gets_no_sample_twice_and_is_given_up(tmp_path: Path, caplog):
    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live), trainer(live, MANY) as fleet, Peer(live) as peer:
            await fleet.publish(0)
            await peer.enter()
            returning = asyncio.create_task(hand_everything_over(peer))
            groups = await play_round(fleet, 0)
            assert len(groups) == 8 and all(len(group.samples) == 4 for group in groups)
            returned = await returning
            assert returned and len(set(returned)) == len(returned), "it got a sample back that it had returned"
            assert not is_connected(live, "mallory") and is_connected(live, "honest")

    run(scenario())
    (given_up,) = (one.getMessage() for one in caplog.records if "mallory is given up" in one.getMessage())
    assert "failed samples of 3 groups in a row that others answered" in given_up
    assert given_up.endswith("the last: handed_over: it was not asked for")
    assert sum(one.stat().st_size for one in tmp_path.rglob("*") if one.is_file()) < 1 << 20


async def die_and_come_back(peer: Peer) -> None:
    """Say of every order that the engine has died, and is there again."""
    with contextlib.suppress(TypeError, ConnectionError):  # the connection was closed
        while True:
            await peer.hear(frames.Orders)
            await peer.say(frames.Down("it was killed"), frames.Back(0))


def test_a_worker_whose_engine_dies_with_all_that_it_is_given_does_not_hold_a_round_up(tmp_path: Path, caplog):
    """Each time it is the least loaded one again, and would get the same samples for ever."""

    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live), trainer(live, MANY) as fleet, Peer(live) as peer:
            await fleet.publish(0)
            await peer.enter()
            dying = asyncio.create_task(die_and_come_back(peer))
            assert len(await play_round(fleet, 0)) == 8
            await dying
            assert not is_connected(live, "mallory") and is_connected(live, "honest")

    run(scenario())
    assert "mallory is given up: its engine died 8 times with samples, and it brought no answer between" in caplog.text


def test_a_worker_that_claims_many_slots_and_brings_nothing_keeps_few_samples_and_fewer_the_next_time(tmp_path: Path):
    rules = FleetRules(heartbeat_timeout_s=600.0, stall_timeout_s=4.0)
    config = msgspec.structs.replace(MANY, fleet_rules=rules)

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            honest_worker(live),
            trainer(live, config) as fleet,
            Peer(live, slots=MAX_SLOTS) as peer,
        ):
            await fleet.publish(0)
            await peer.enter()
            playing = asyncio.create_task(play_round(fleet, 0))
            await peer.until_ordered()
            fate = await peer.fate()
            assert fate.why == "it has samples and brings no token"
            assert len(peer.orders) <= 8
            assert len(await playing) == 8
            peer.orders.clear()
            await peer.enter()
            playing = asyncio.create_task(play_round(fleet, 1))
            await fleet.publish(1)
            await peer.hear(frames.PullOrder)
            await peer.say(frames.Installed(1))
            await peer.until_ordered()
            await peer.fate()
            assert len(peer.orders) <= 2
            assert len(await playing) == 8

    run(scenario(), timeout_s=90.0)


def test_more_slots_than_any_engine_has_are_refused(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live, slots=1_000_000) as peer:
            with pytest.raises(UserError, match="worker mallory: slots: got 1000000, expected at most 65536"):
                await peer.join()
            assert live.refused == {"slots": 1}

    run(scenario())


# Versions that they do not have


def test_tokens_of_a_version_that_is_published_and_not_installed_are_refused(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live) as peer:
            playing, order = await begin_round(fleet, peer, 0)
            await fleet.publish(1)
            await peer.hear(frames.PullOrder)
            await peer.say(tokens(order.lease, version=1))
            assert "expected those of 0" in (await peer.fate()).why
            assert live.refused == {"version": 1}
            playing.cancel()

    run(scenario())


def test_tokens_of_a_version_older_than_the_lease_are_refused(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live, version=1) as peer:
            playing, order = await begin_round(fleet, peer, 1)
            await peer.say(tokens(order.lease, version=0))
            assert "expected 1, which the lease was given to" in (await peer.fate()).why
            assert live.refused == {"version": 1}
            playing.cancel()

    run(scenario())


def test_a_late_row_of_a_strange_version_excuses_no_row_beside_it(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live, version=1) as peer:
            playing, order = await begin_round(fleet, peer, 1)
            timely, late = tokens(order.lease, version=0), tokens(999_999, version=50)
            names = ("leases", "offsets", "counts", "versions", "cells")
            await peer.say(frames.NewTokens(1, *(getattr(timely, name) + getattr(late, name) for name in names)))
            assert "expected 1, which the lease was given to" in (await peer.fate()).why
            playing.cancel()

    run(scenario())


@pytest.mark.parametrize("version", [0, 7])
def test_a_worker_that_holds_a_version_before_it_is_published_is_welcome_and_pulls_it(tmp_path: Path, version: int):
    """Its engine may have the weights that the run starts from, or those of another run."""

    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live, version=version) as peer:
            await fleet.settled()
            await peer.enter()
            await fleet.publish(0)
            assert (await peer.hear(frames.PullOrder)).version == 0
            assert live.refused == {}

    run(scenario())


# Sessions and connections


def test_tokens_before_a_hello_are_refused(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live) as peer:
            await peer.join()
            await peer.dial()
            await peer.say(tokens(1))
            assert (await peer.fate()).why == "refused: a NewTokens; expected a Hello first"
            assert live.refused == {"order": 1}

    run(scenario())


def test_tokens_before_there_is_a_run_are_refused(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live) as peer:
            await peer.enter()
            await peer.say(frames.InstallFailed(3, "no such version"), frames.Report(0, 0, 0.0, 0, 0.0), tokens(1))
            assert (await peer.fate()).why == "refused: tokens before any lease; expected them after an order"
            assert live.refused == {"order": 1, "late_news": 1}

    run(scenario())


@pytest.mark.parametrize("session", ["", "0" * 32, "\u00fc\u00f1", "x" * 5000])
def test_a_session_that_nobody_has_is_gone(tmp_path: Path, session: str):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live) as peer:
            await peer.join()
            with pytest.raises(aiohttp.WSServerHandshakeError) as refused:
                await peer.dial(session)
            assert refused.value.status == 410
            assert live.refused == {"session": 1}

    run(scenario())


def test_who_was_refused_cannot_come_back_with_its_session(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live) as peer:
            await peer.enter()
            await peer.send(b"garbage")
            why = (await peer.fate()).why
            await peer.dial()
            assert (await peer.fate()).why == why, "it hears it again, and that is all"
            assert not live.service.lobby.workers

    run(scenario())


HELLOS = {
    "news of 100000 leases in one frame; expected few, since it had 4 at once": [3] * 100_000,
    "it holds lease 4611686018427387904, which was never given; expected its own": [1 << 62],
}


@pytest.mark.parametrize("why", HELLOS)
def test_a_hello_of_leases_that_cannot_be_is_refused(tmp_path: Path, why: str):
    async def act(peer: Peer, _: frames.Order) -> None:
        await peer.dial()
        await peer.say(frames.Hello(0, columns.pack_column("<u8", HELLOS[why])))

    scene = run(beside_an_honest_worker(tmp_path, act))
    assert scene.fate.why == f"refused: {why}"
    assert scene.refused == {"lease": 1}


def test_a_lease_that_is_held_many_times_is_answered_once(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live) as peer:
            await fleet.publish(0)
            await fleet.settled()
            await peer.enter()
            await fleet._state(lambda seq: frames.RequestRound(seq, 0))
            lease = (await peer.until_ordered()).lease
            await peer.dial()  # again: the first connection is over by that
            await peer.say(frames.Hello(0, columns.pack_column("<u8", [lease] * 50)))
            assert [one.lease for one in (await peer.hear(frames.Welcome)).held] == [lease]

    run(scenario())


def test_a_peer_that_connects_and_never_says_hello_is_cut_off(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live) as peer:
            await peer.join()
            await peer.dial()
            await peer.socket.ping()  # being there is not saying something
            assert (await peer.fate()).code == 1008
            assert live.refused == {"silent": 1}

    run(scenario())


# Names


def test_a_name_whose_worker_is_connected_cannot_be_taken(tmp_path: Path):
    """All workers have the same token; it takes more than that to end one and get its samples."""

    async def act(peer: Peer, _: frames.Order) -> None:
        peer.facts = msgspec.structs.replace(peer.facts, name="honest")
        with pytest.raises(NameTaken, match="a worker 'honest' is connected already"):
            await peer.join()

    scene = run(beside_an_honest_worker(tmp_path, act, stays=True))
    assert scene.refused == {"name": 1}


def test_the_trainers_own_worker_gets_its_name_back_from_whoever_took_it(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live, "trainer") as mallory:
            await mallory.enter()
            mine = msgspec.structs.replace(mallory.facts, local=True)
            async with Dialer(live.url, live.token("admin")) as dialer:
                await dialer.post("/v1/join", mine, JoinReply)
            assert (await mallory.fate()).code != 1000

    run(scenario())


def test_a_name_whose_worker_is_gone_is_taken_over_after_three_heartbeats_and_the_round_goes_on(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live, "honest") as old:
            playing, _ = await begin_round(fleet, old, 0)
            prompts: dict[int, Prompt] = {}
            prompts |= prompts_of(live)
            await old.socket.close()
            async with honest_worker(live):
                await old.dial()
                assert (await old.fate()).why == "another process joined under its name"
                check_right(await playing, prompts)
                assert live.service.lobby.lives == {"honest": 2}
                assert live.refused.keys() == {"name"}

    run(scenario())


def graceful(grace_s: float) -> ManagerSettings:
    return msgspec.structs.replace(QUICK, restart_grace_s=grace_s)


def test_nobody_takes_the_name_of_a_worker_that_a_manager_started_again_waits_for(tmp_path: Path):
    async def scenario() -> None:
        sessions: dict[str, str] = {}
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live, "honest") as honest:
            await fleet.publish(0)
            await honest.enter()
            sessions["honest"] = honest.session
        async with manager(tmp_path, graceful(20.0)) as live, Peer(live, "honest") as mallory:
            with pytest.raises(NameTaken, match="a worker 'honest' is connected already, or was a moment ago"):
                await mallory.join()
            async with Peer(live, "honest") as honest:
                await honest.dial(sessions["honest"])
                await honest.say(frames.Hello(0, b""))
                await honest.hear(frames.Welcome)
                assert is_connected(live, "honest")
                assert live.service.lobby.lives == {"honest": 1}

    run(scenario())


def test_the_name_of_a_worker_that_never_comes_back_is_free_when_the_grace_is_over(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live), Peer(live, "honest") as honest:
            await honest.enter()
        async with manager(tmp_path, graceful(0.2)) as live, Peer(live, "honest") as another:
            await asyncio.sleep(0.2 + 3 * QUICK.stream.heartbeat_interval_s)
            await another.enter()
            assert live.service.lobby.lives == {"honest": 2}

    run(scenario())


def test_the_name_of_a_worker_that_was_given_up_is_kept_for_who_shows_its_session(tmp_path: Path):
    async def scenario() -> None:
        config = msgspec.structs.replace(CONFIG, fleet_rules=FleetRules(heartbeat_timeout_s=0.5))
        async with manager(tmp_path, graceful(20.0)) as live, trainer(live, config) as fleet:
            await fleet.publish(0)
            async with Peer(live, "honest") as honest, Peer(live, "honest") as mallory:
                await honest.enter()
                await until(lambda: not live.service.lobby.workers, "it is given up: it said nothing")
                with pytest.raises(NameTaken):
                    await mallory.join()
                async with dialer(live) as dialled:
                    before = honest.session
                    assert (await dialled.get("/v1/workers/honest", NameReply)).refusal
                    assert not (await dialled.get("/v1/workers/honest", NameReply, before)).refusal
                    assert (await dialled.post("/v1/join", honest.facts, JoinReply, before)).session != before

    run(scenario())


def test_a_worker_started_again_with_its_session_has_its_name_at_once(tmp_path: Path):
    async def scenario() -> None:
        keeps = HONEST._replace(session_file=tmp_path / "honest.session")
        async with manager(tmp_path / "run", graceful(300.0)) as live:
            for life in (1, 2, 3):
                task = asyncio.create_task(WorkerAgent(EmulatedEngine(ENGINE), dialer(live), keeps).run())
                await until(lambda life=life: live.service.lobby.lives == {"honest": life}, f"life {life}")
                await until(lambda: is_connected(live, "honest"), "it is connected")
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task
            assert "name" not in live.refused

    run(scenario())


@pytest.mark.parametrize("text", ["not a session", "0" * 65, "aa\nX-Admin: yes"])
def test_a_session_file_that_is_none_is_one_line(tmp_path: Path, text: str):
    path = tmp_path / "honest.session"
    path.write_text(text)
    with pytest.raises(UserError, match="is no session of a worker; expected what a worker wrote there"):
        WorkerAgent(EmulatedEngine(ENGINE), Dialer("http://127.0.0.1:1", "t"), HONEST._replace(session_file=path))


def test_a_name_whose_worker_is_silent_is_taken_over_and_the_silent_one_is_told(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path, ManagerSettings()) as live, Peer(live) as old, Peer(live) as new:
            lobby = live.service.lobby
            await old.enter()
            with pytest.raises(NameTaken):
                await new.join()
            lobby.set_clock(lobby.now() + 3.5 * live.service.settings.stream.heartbeat_interval_s)
            await new.enter()
            assert (await old.fate()).why == "another process joined under its name"
            assert is_connected(live, "mallory")

    run(scenario())


def test_a_second_worker_of_a_name_waits_and_has_it_when_the_first_is_gone(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live:
            async with honest_worker(live):
                second = asyncio.create_task(WorkerAgent(EmulatedEngine(ENGINE), dialer(live), HONEST).run())
                await until(lambda: live.refused.get("name", 0) > 2, "the second one tries")
                assert live.service.lobby.lives == {"honest": 1}
            await until(lambda: live.service.lobby.lives == {"honest": 2}, "the second one has it")
            second.cancel()

    run(scenario())


class LargeEngine(EmulatedEngine):
    """Notes that it was asked to load its model."""

    has_loaded = False

    async def start(self, sink: Sink) -> EngineInfo:
        self.has_loaded = True
        return await super().start(sink)


def test_a_worker_whose_name_stays_taken_hears_it_before_its_model_is_loaded(tmp_path: Path):
    async def scenario() -> None:
        engine = LargeEngine(ENGINE)
        async with manager(tmp_path) as live, honest_worker(live):
            left = await WorkerAgent(engine, dialer(live), HONEST._replace(name_patience_s=0.2)).run()
            assert not left.ok and "a worker 'honest' is connected already" in str(left)
            assert not engine.has_loaded
            assert live.service.lobby.lives == {"honest": 1}

    run(scenario())


def test_a_worker_that_comes_back_is_let_in_when_its_former_self_is_missed_however_late_that_is(tmp_path: Path):
    """It died without a word: the connection stands, and reports are rare."""
    rare = msgspec.structs.replace(QUICK.stream, heartbeat_interval_s=0.7)
    impatient = HONEST._replace(name_patience_s=0.1)

    async def scenario() -> None:
        async with manager(tmp_path, msgspec.structs.replace(QUICK, stream=rare)) as live, Peer(live, "honest") as dead:
            await dead.enter()
            life = asyncio.create_task(WorkerAgent(EmulatedEngine(ENGINE), dialer(live), impatient).run())
            await until(lambda: live.service.lobby.lives == {"honest": 2}, "it has its name again")
            assert (await dead.fate()).why == "another process joined under its name"
            life.cancel()

    run(scenario())


def test_a_worker_that_leaves_is_not_in_the_way_of_the_next_of_its_name(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet, Peer(live, "honest") as old:
            playing, _ = await begin_round(fleet, old, 0)
            await old.say(frames.Leaving("its machine goes"))
            await old.hear(frames.Stop)
            async with dialer(live) as asking:
                assert (await asking.get("/v1/workers/honest", NameReply)).refusal == ""
                with pytest.raises(NameTaken):  # it is still there
                    await asking.post("/v1/join", old.facts, JoinReply)
            playing.cancel()

    run(scenario())


HONEST = WorkerOptions("honest")


def dialer(live: Live) -> Dialer:
    return Dialer(live.url, live.token("worker"))


def test_workers_that_came_and_went_before_there_was_a_run_are_forgotten(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live, "stays") as staying, Peer(live, "goes") as going:
            lobby = live.service.lobby
            await staying.enter()
            for name in ("one", "two", "three"):
                going.facts = msgspec.structs.replace(going.facts, name=name)
                await going.join()
            assert set(lobby.lives) == set(lobby.workers) == {"stays", "one", "two", "three"}
            lobby.set_clock(lobby.now() + 61.0)
            await going.join()
            assert set(lobby.lives) == set(lobby.workers) == {"stays", "three"}

    run(scenario())


# The trainer's side

TRAINER_LIES: dict[str, tuple[str, bytes]] = {
    "garbage": ("frame", b"\xc1"),
    "a worker's frame": ("frame", frames.encode(frames.Installed(0))),
    "a sampling that is not a number": (
        "frame",
        frames.encode(
            frames.SupplyPrompts(1, (frames.PromptPayload(1, b"abcd", frames.Sampling(temperature=math.nan)),))
        ),
    ),
    "half a prompt": (
        "prompt",
        frames.encode(frames.SupplyPrompts(1, (frames.PromptPayload(1, b"abcdef", SAMPLING),))),
    ),
    "no prompt": ("prompt", frames.encode(frames.SupplyPrompts(1, (frames.PromptPayload(1, b"", SAMPLING),)))),
    "a reward that is not a number": (
        "reward",
        frames.encode(frames.Scored(1, 1024, 1, "scored", math.nan, True, 0.0)),
    ),
}


@pytest.mark.parametrize("name", TRAINER_LIES)
def test_a_trainer_that_cannot_be_right_is_refused_and_may_come_back(tmp_path: Path, name: str):
    kind, raw = TRAINER_LIES[name]

    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live):
            async with trainer(live, prompts=never) as fleet:
                await fleet.publish(0)
                await fleet.settled()
            await lie_as_a_trainer(live, [frames.TrainerHello(), frames.RequestRound(1, 0), raw])
            assert live.refused == {kind: 1}
            prompts: dict[int, Prompt] = {}
            prompts |= prompts_of(live)
            async with trainer(live) as fleet:
                check_right(await play_round(fleet, 0), prompts)

    run(scenario())


def never(domain: int, prompt: int, epoch: int) -> Prompt:
    raise AssertionError("this trainer asks for no round")


async def lie_as_a_trainer(live: Live, said: list[frames.FromTrainer | bytes]) -> None:
    """Open the run as a trainer would, say all that, and wait until the connection is over."""
    async with Dialer(live.url, live.token("admin")) as dialer:
        opened = await dialer.post("/v1/run", RunRequest(protocol=frames.PROTOCOL, config=CONFIG), RunReply)
        socket = await dialer.stream("/v1/trainer", opened.session, 1 << 28)
        for one in said:
            await socket.send_bytes(one if isinstance(one, bytes) else frames.encode(one))
        async for _ in socket:
            pass


def test_a_trainer_that_scores_nothing_may_follow_one_that_did(tmp_path: Path):
    async def never_scored(_: Sample) -> float:
        await asyncio.sleep(1000)
        return 1.0

    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live):
            async with trainer(live, reward=never_scored) as fleet:
                await fleet.publish(0)
                playing = asyncio.create_task(play_round(fleet, 0))
                await until(lambda: running_rewards(live) == 8, "all is generated, nothing scored")
                playing.cancel()
            prompts: dict[int, Prompt] = {}
            prompts |= prompts_of(live)
            async with trainer(live) as fleet:
                check_right(await play_round(fleet, 0), prompts)

    run(scenario())


def running_rewards(live: Live) -> int:
    opened = live.service.lobby.run
    return 0 if opened is None else len(opened.desk.scoring.running)


def test_only_the_reward_that_is_waited_for_counts(tmp_path: Path):
    """A late answer to an earlier attempt, or one that comes after the delivery, changes nothing."""

    async def scored(_: Sample) -> float:
        return 1.0

    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live), trainer(live, reward=scored) as fleet:
            await fleet.publish(0)
            async for group in fleet.round(0):
                for sample in group.samples:
                    assert sample.reward == 1.0
                    await fleet._state(
                        lambda seq, one=sample.id: frames.Scored(seq, one, 1, "scored", -9.0, False, 0.0)
                    )
            await fleet.settled()
            assert {text.reward for text in live.service.lobby.need_run().payload.tokens.values()} == {1.0}

    run(scenario())
