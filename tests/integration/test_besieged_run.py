"""One worker token against a run of real processes: all that a review did with it, while `polyrl train` trains.

Each attack is told what it is told, the run trains on between them, and none of it is in what was trained. The same
attacks beside a manager in the test's own process are in test_hostile_peers.py and its neighbours.
"""

import asyncio
import contextlib
import json
import signal
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
from msgspec import structs
from tests.integration.desks import bare_desk, join, model, polyrl
from tests.integration.live import Fate, Peer, run, tokens
from tests.integration.test_many_names import Place, beat
from tests.integration.test_strangers_words import HOSTILE
from tests.integration.test_unfinished import begin_message
from tests.warm import WarmProcess

from polyrl.cli.main import main
from polyrl.errors import UserError
from polyrl.telemetry.metrics import read_metrics
from polyrl.wire import frames
from polyrl.wire.control import MAX_SLOTS, Status
from polyrl.wire.dial import Dialer, NameTaken, Unreachable

__all__ = ["bare_desk", "model"]  # fixtures
VOCAB = 64
CAP = 16
STALL_S = 4.0
RECIPE = f"""
name = "tiny"
model.path = "model"
train.steps = 100000
rollout.max_new_tokens = {CAP}
data = {{ source = "rows.jsonl", prompts_per_step = 4, reward = "mine:score" }}
validation.at_start = false
rounds.samples_per_prompt = 4
algorithm.zero_variance = "keep"
manager.port = 0
seeding = {{ mode = "off" }}
fleet_rules = {{ stall_timeout_s = {STALL_S} }}
"""
OVER = (aiohttp.ClientError, ConnectionError, TypeError, Unreachable, TimeoutError)
MB = 1 << 20


def steps_of(place: Place) -> int:
    path = place.run_dir / "metrics.jsonl"
    return len(read_metrics(path)) if path.exists() else 0


async def status_of(place: Place) -> Status:
    async with Dialer(place.url, place.token("admin")) as dialer:
        return await dialer.get("/v1/status", Status)


Say = Callable[[Peer, frames.Order, int], Awaitable[None]]


async def with_orders(place: Place, name: str, say: Say, *, every: bool = False, slots: int = 4) -> Fate:
    """Join, claim to have each version, and say something of the first order, or of every one. How it ended."""
    version, why = -1, ""
    async with Peer(place, name, slots=slots, version=None) as peer:  # type: ignore[arg-type]
        await peer.enter()
        beating = asyncio.create_task(beat(peer))
        try:
            async with asyncio.timeout(60.0):
                async for message in peer.socket:
                    frame = frames.decode_to_worker(message.data)
                    if isinstance(frame, frames.PullOrder):
                        version = frame.version
                        await peer.say(frames.Installed(version, frame.digest))
                    elif isinstance(frame, frames.Release):
                        why = frame.why
                    elif isinstance(frame, frames.Orders) and (every or not peer.orders):
                        with contextlib.suppress(*OVER):  # it was cut off before it had said all
                            for order in frame.orders:
                                peer.orders.append(order)
                                await say(peer, order, version)
                                if not every:
                                    break
        finally:
            beating.cancel()
            await asyncio.gather(beating, return_exceptions=True)
        return Fate(why, peer.socket.close_code)


def answer(
    order: frames.Order,
    version: int,
    ids: Sequence[int],
    reason: frames.EndReason = "stop",
    logprob: float = -4.0,
) -> frames.NewTokens:
    done = len(order.so_far) // 4
    said = tokens(order.lease, offset=done, version=version, ids=ids, logprobs=[logprob] * len(ids))
    return structs.replace(said, ended=(frames.Ended(order.lease, done + len(ids), reason),))


def lie(make: Callable[[frames.Order, int], frames.FromWorker]) -> Say:
    async def say(peer: Peer, order: frames.Order, version: int) -> None:
        await peer.say(make(order, version))

    return say


LIES: dict[str, tuple[Say, str]] = {
    "beyond": (lie(lambda one, version: answer(one, version, [7, VOCAB])), "token id 64"),
    "largest": (lie(lambda one, version: answer(one, version, [2**31 - 1])), "token id 2147483647"),
    "endless": (lie(lambda one, version: answer(one, version, [7], logprob=-3e38)), "log-probability of -3e+38"),
    "nan": (lie(lambda one, version: answer(one, version, [7], logprob=float("nan"))), "log-probability of nan"),
    "cut": (lie(lambda one, version: answer(one, version, [7], "length")), "cut off after 1 token"),
    "unstopped": (lie(lambda one, version: answer(one, version, [7])), "which ends none"),
    "overlong": (lie(lambda one, version: answer(one, version, [7] * (CAP + 1), "length")), f"{CAP}"),
    "gap": (lie(lambda one, version: tokens(one.lease, offset=9, version=version)), "gap"),
    "future": (lie(lambda one, version: tokens(one.lease, version=version + 1000)), "which it does not hold"),
    "unpublished": (lie(lambda _, version: frames.Installed(version + 1000)), "never published"),
    "duty": (lie(lambda _one, _version: frames.OnDuty("training")), "only the trainer's own workers have duties"),
    "number": (lie(lambda _one, _version: frames.Hello(0, b"\1\2\3")), "ends inside a number"),
}


async def attack_by_lies(place: Place) -> None:
    for name, (say, words) in LIES.items():
        fate = await with_orders(place, name, say)
        assert fate.why.startswith("refused: ") and words in fate.why and "expected" in fate.why, (name, fate)


async def attack_by_hand_overs(place: Place) -> None:
    async def say(peer: Peer, order: frames.Order, _version: int) -> None:
        ended = (frames.Ended(order.lease, len(order.so_far) // 4, "handed_over"),)
        await peer.say(frames.NewTokens(1, b"", b"", b"", b"", b"", ended))

    fate = await with_orders(place, "returns", say, every=True)
    assert fate.why.startswith("it failed samples of 3 groups in a row that others answered"), fate


async def attack_by_forging(place: Place) -> None:
    """It has no weights: the digest that it must name is in the order to fetch them."""

    async def say(peer: Peer, order: frames.Order, version: int) -> None:
        num = CAP - len(order.so_far) // 4
        await peer.say(answer(order, version, [7] * num, "length", -60.0))

    fate = await with_orders(place, "forger", say, every=True)
    assert "groups were rejected for what it wrote" in fate.why, fate


async def attack_by_claims(place: Place) -> None:
    with pytest.raises(UserError, match="worker much: slots: got 1000000, expected at most 65536"):
        await with_orders(place, "much", lie(lambda *_: frames.Back(-1)), slots=1_000_000)

    async def sits(_peer: Peer, _order: frames.Order, _version: int) -> None:
        pass

    began = time.monotonic()
    fate = await with_orders(place, "sits", sits, every=True, slots=MAX_SLOTS)
    assert fate.why == "it has samples and brings no token"
    assert time.monotonic() - began < 10 * STALL_S
    async with Peer(place, "dear") as peer:  # type: ignore[arg-type]
        peer.facts = structs.replace(peer.facts, price_usd_per_hour=1e6)
        with pytest.raises(UserError, match="worker 'dear' says that it costs 1,000,000"):
            await peer.enter()


async def attack_by_floods(place: Place) -> None:
    async def floods(peer: Peer, order: frames.Order, _version: int) -> None:
        over = frames.Ended(order.lease, len(order.so_far) // 4, "engine_failed")
        await peer.say(frames.NewTokens(1, b"", b"", b"", b"", b"", (over,)))
        late = tokens(order.lease, ids=[7] * CAP)
        for _ in range(20_000):
            await peer.say(late)

    await with_orders(place, "floods", floods)  # it is cut off in the midst of it, and its log line says why

    async def many(peer: Peer, order: frames.Order, _version: int) -> None:
        one = tokens(order.lease)
        columns = {name: getattr(one, name) * 100_000 for name in ("leases", "offsets", "counts", "versions", "cells")}
        await peer.say(structs.replace(one, **columns))

    fate = await with_orders(place, "many", many)
    assert "news of 100000 leases in one frame" in fate.why, fate


async def attack_by_names(place: Place) -> None:
    (honest,) = (one.name for one in (await status_of(place)).workers if not one.local)
    async with Peer(place, honest) as thief:  # type: ignore[arg-type]
        with pytest.raises(NameTaken, match="is connected already"):
            await thief.join()
    for number in range(60):
        async with Peer(place, f"comes-and-goes-{number}", version=None) as peer:  # type: ignore[arg-type]
            await peer.enter()
            await peer.say(frames.Goodbye(HOSTILE))
            await peer.fate()


async def attack_by_addresses(place: Place) -> None:
    """It says that it passes weights on, at an address of another machine."""
    with socket.create_server(("127.0.0.2", 0)) as trap:
        trap.settimeout(0.01)
        async with Peer(place, "relay", version=None) as peer:  # type: ignore[arg-type]
            peer.facts = structs.replace(peer.facts, relays=True)
            await peer.join()
            await peer.dial()
            await peer.say(frames.Hello(-1, b"", weight_addresses=(f"127.0.0.2:{trap.getsockname()[1]}",)))
            pulled = await peer.hear(frames.PullOrder)
            await peer.say(frames.Installed(pulled.version, pulled.digest))
            await trained(place, 2)
            with pytest.raises(TimeoutError):
                trap.accept()


async def attack_by_connections(place: Place) -> None:
    """Strangers without a word, and messages that do not end: who sends these sends no heartbeat, and is cut off."""
    host, port = place.url.removeprefix("http://").split(":")
    strangers = [socket.create_connection((host, int(port)), timeout=2.0) for _ in range(300)]
    try:
        peers = [Peer(place, f"unfinished-{number}", version=None) for number in range(24)]  # type: ignore[arg-type]
        async with contextlib.AsyncExitStack() as stack:
            for peer in peers:
                await stack.enter_async_context(peer)
                with contextlib.suppress(*OVER):
                    await peer.enter()
                    await begin_message(peer, 15 * MB)
            await trained(place, 1)
    finally:
        for one in strangers:
            one.close()
    assert most_memory_mb(place) < 600


def most_memory_mb(place: Place) -> float:
    pid = json.loads((place.run_dir / "manager.json").read_text())["pid"]
    (line,) = (one for one in Path(f"/proc/{pid}/status").read_text().splitlines() if one.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


async def trained(place: Place, num: int) -> None:
    """Wait until so many more steps are trained."""
    target = steps_of(place) + num
    async with asyncio.timeout(60.0):
        while steps_of(place) < target:
            await asyncio.sleep(0.05)


ATTACKS = (
    attack_by_lies,
    attack_by_hand_overs,
    attack_by_forging,
    attack_by_claims,
    attack_by_floods,
    attack_by_names,
    attack_by_addresses,
    attack_by_connections,
)


@asynccontextmanager
async def besieged(training: WarmProcess, run_dir: Path) -> AsyncIterator[Place]:
    while not (run_dir / "manager.json").exists() and training.poll() is None:
        await asyncio.sleep(0.05)
    place = Place(json.loads((run_dir / "manager.json").read_text())["url"], run_dir)
    while all(one.local for one in (await status_of(place)).workers):
        await asyncio.sleep(0.1)
    await trained(place, 1)
    yield place
    await trained(place, 2)
    assert training.poll() is None


def ended(training: WarmProcess, timeout_s: float) -> str:
    try:
        return training.communicate(timeout=timeout_s)[0]
    finally:
        if training.poll() is None:
            training.kill()
            training.wait()


@pytest.mark.timeout(400)
def test_no_attack_with_a_workers_token_ends_a_run_or_is_trained_on(bare_desk: Path):
    (bare_desk / "mine.py").write_text("def score(given):\n    return float(given.num_tokens % 2)\n")
    (bare_desk / "recipe.toml").write_text(RECIPE)
    run_dir = bare_desk / "runs" / "tiny"
    training = polyrl("train", "recipe.toml", together=True)
    honest = join(run_dir)

    async def scenario() -> None:
        async with besieged(training, run_dir) as place:
            for attack in ATTACKS:
                await attack(place)
                await trained(place, 1)

    try:
        run(scenario(), timeout_s=300.0)
    finally:
        training.send_signal(signal.SIGINT)
        said = ended(training, 60)
        honest.terminate()
        ended(honest, 60)
    assert training.returncode == 130, said
    num_steps = len(read_metrics(run_dir / "metrics.jsonl"))
    going_on = polyrl("train", "--resume", "runs/tiny", f"train.steps={num_steps + 2}", together=True)
    said += ended(going_on, 120)
    assert going_on.returncode == 0, said
    assert [line["step"] for line in read_metrics(run_dir / "metrics.jsonl")] == list(range(num_steps + 2))
    assert "log-probabilities" in said and "samples of worker forger are not trained on" in said
    log = (run_dir / "logs" / "manager.log").read_text()
    assert [name for name in (*LIES, "floods", "many") if f"worker {name} is refused: " not in log] == []
    assert "Traceback" not in said + log and "\x1b" not in said + log
    assert main(["ledger", str(run_dir), "--verify"]) == 0
