"""A manager on loopback, honest workers beside it, and peers that say whatever a test wants.

Everything runs in one event loop, in this process; nothing is patched. `manager_in_thread` is for clients that block.
"""

import asyncio
import contextlib
import importlib
import ssl
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import aiohttp
from tests.chaos.fleet import expected_tokens

from polyrl.client import Fleet, Group, Prompt, connect
from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.engines.emulated.text import EOS
from polyrl.manager.http import Front, ListenAddress
from polyrl.manager.peers.streams import FindModule
from polyrl.manager.service import Service
from polyrl.manager.settings import LimitSettings, ManagerSettings, StreamSettings
from polyrl.run.event_loop import run_loop
from polyrl.scheduling.core.parameters import DomainData, FleetRules, RoundsConfig, SchedulerConfig
from polyrl.wire import columns, frames
from polyrl.wire.control import SESSION_HEADER, AnswerRules, JoinReply, JoinRequest
from polyrl.wire.credentials import bearer, read_token_file
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import WorkerAgent, WorkerOptions

FrameT = TypeVar("FrameT", bound=frames.Frame)
PATIENCE_S = 20.0

QUICK = ManagerSettings(
    stream=StreamSettings(flush_interval_s=0.01, heartbeat_interval_s=0.1),
    limits=LimitSettings(request_timeout_s=1.0),
)
ENGINE = EmulatedConfig(slots=4, tokens_per_s=400.0, median_tokens=30.0, sigma=0.5)
MODEL = AnswerRules(vocab=ENGINE.vocab, end_ids=(EOS,), max_context=4096)
"""What a trainer says that its model can write, if it is the emulated engine's."""
CONFIG = SchedulerConfig(
    domains=(DomainData(name="d", prompts_per_step=2, num_prompts=50),),
    max_new_tokens=64,
    rounds=RoundsConfig(samples_per_prompt=4),
    fleet_rules=FleetRules(heartbeat_timeout_s=3.0),  # a peer says nothing by itself, and this machine may be busy
)


class Live(NamedTuple):
    """A manager that answers."""

    service: Service
    address: ListenAddress

    @property
    def url(self) -> str:
        return self.address.url

    def token(self, scope: str) -> str:
        return read_token_file(self.service.run_dir / f"{scope}.token")

    def headers(self, scope: str) -> dict[str, str]:
        return bearer(self.token(scope))

    @property
    def refused(self) -> dict[str, int]:
        """As the status tells it, at once."""
        return dict(self.service.lobby.refused)


@asynccontextmanager
async def manager(
    run_dir: Path,
    settings: ManagerSettings = QUICK,
    tls: ssl.SSLContext | None = None,
    find: FindModule = importlib.import_module,
) -> AsyncIterator[Live]:
    """Stops like `polyrl manager`, and fails if its owner failed."""
    service = Service(run_dir, settings)
    front = Front(service, find=find)
    address = await front.listen("127.0.0.1", 0, tls)
    owner = asyncio.create_task(service.own())
    try:
        yield Live(service, address)
    finally:
        died = owner.done()
        owner.cancel()
        await front.close("the manager stops")
        service.close()
        if died:
            owner.result()


@contextmanager
def manager_in_thread(run_dir: Path, settings: ManagerSettings = QUICK) -> Iterator[Live]:
    ready, stop = threading.Event(), threading.Event()
    found: list[Live] = []

    async def serve() -> None:
        async with manager(run_dir, settings) as live:
            found.append(live)
            ready.set()
            while not stop.is_set():
                await asyncio.sleep(0.02)

    thread = threading.Thread(target=lambda: run_loop(serve()), daemon=True)
    thread.start()
    assert ready.wait(PATIENCE_S)
    try:
        yield found[0]
    finally:
        stop.set()
        thread.join(PATIENCE_S)


def run(scenario: Awaitable[Any], timeout_s: float = 30.0) -> Any:
    """Play a scenario on the loop that the command line uses too."""

    async def bounded() -> Any:
        async with asyncio.timeout(timeout_s):
            return await scenario

    return run_loop(bounded())


async def until(holds: Callable[[], bool], what: str, timeout_s: float = PATIENCE_S) -> None:
    try:
        async with asyncio.timeout(timeout_s):
            while not holds():
                await asyncio.sleep(0.01)
    except TimeoutError as error:
        raise AssertionError(f"not within {timeout_s} s: {what}") from error


# The honest


@asynccontextmanager
async def honest_worker(live: Live, engine: EmulatedConfig = ENGINE, name: str = "honest") -> AsyncIterator[None]:
    agent = WorkerAgent(EmulatedEngine(engine), Dialer(live.url, live.token("worker")), WorkerOptions(name))
    life = asyncio.create_task(agent.run())
    try:
        await until(lambda: is_connected(live, name), f"{name} is connected")
        yield
    finally:
        life.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await life


def is_connected(live: Live, name: str) -> bool:
    return any(one.name == name and one.greeted for one in live.service.lobby.workers.values())


def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
    return Prompt([5, 6, 7, 8 + prompt])


def prompts_of(live: Live) -> dict[int, Prompt]:
    """Which group asks what, of those that the manager knows now."""
    groups = live.service.lobby.need_run().scheduler.desk.groups.values()
    return {one.id: prompt_of(one.domain, one.prompt, one.epoch) for one in groups}


@asynccontextmanager
async def trainer(live: Live, config: SchedulerConfig = CONFIG, **options: Any) -> AsyncIterator[Fleet]:
    options = {"prompts": prompt_of, **options}
    async with connect(live.url, live.token("admin"), config, **options) as fleet:
        yield fleet


async def play_round(fleet: Fleet, step: int) -> list[Group]:
    """A step from the trainer's seat; its version is published already."""
    groups: list[Group] = []
    async for group in fleet.round(step):
        groups.append(group)
        await fleet.take(group)
    await fleet.step_done(step)
    await fleet.settled()
    return groups


def check_right(
    groups: Sequence[Group],
    prompts: dict[int, Prompt],
    config: SchedulerConfig = CONFIG,
    engine: EmulatedConfig = ENGINE,
) -> None:
    """Every sample of a round is there, and is what an honest engine writes, whoever else had it before."""
    assert len(groups) == config.domains[0].prompts_per_step
    for group in groups:
        assert len(group.samples) == config.rounds.samples_per_prompt
        for sample in group.samples:
            assert sample.tokens.tolist() == expected_tokens(sample.id, prompts[group.id], config, engine), sample.name
            assert sample.finish in ("stop", "length")
            assert "honest" in {segment.worker for segment in sample.segments}, sample.name


# Whoever else


class Fate(NamedTuple):
    """How a connection ended for the one who dialled."""

    why: str
    """What it was told; empty if it was told nothing."""
    code: int | None


class Peer:
    """A worker made of a script: it says what it is made to say, true or not."""

    def __init__(self, live: Live, name: str = "mallory", *, slots: int = 4, version: int | None = 0) -> None:
        self.live = live
        self.facts = JoinRequest(name=name, protocol=frames.PROTOCOL, engine="script", slots=slots, version=version)
        self.session = ""
        self.orders: list[frames.Order] = []
        self._http = aiohttp.ClientSession(headers=live.headers("worker"))
        self._socket: aiohttp.ClientWebSocketResponse | None = None

    async def __aenter__(self) -> "Peer":
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.close()

    async def join(self) -> None:
        async with Dialer(self.live.url, self.live.token("worker")) as dialer:
            self.session = (await dialer.post("/v1/join", self.facts, JoinReply, self.session)).session

    async def dial(self, session: str | None = None) -> None:
        headers = {SESSION_HEADER: self.session if session is None else session}
        self._socket = await self._http.ws_connect(self.live.url + "/v1/worker", headers=headers, max_msg_size=1 << 28)

    async def enter(self) -> None:
        """Join, connect and be welcome."""
        await self.join()
        await self.dial()
        await self.say(frames.Hello(-1 if self.facts.version is None else self.facts.version, b""))
        await self.hear(frames.Welcome)

    @property
    def socket(self) -> aiohttp.ClientWebSocketResponse:
        assert self._socket is not None
        return self._socket

    async def say(self, *said: frames.FromWorker) -> None:
        for frame in said:
            await self.send(frames.encode(frame))

    async def send(self, raw: bytes) -> None:
        await self.socket.send_bytes(raw)

    async def hear(self, kind: type[FrameT]) -> FrameT:
        """The next frame of that kind; others are let pass, but orders are kept."""
        async with asyncio.timeout(PATIENCE_S):
            while True:
                frame = frames.decode_to_worker(await self.socket.receive_bytes())
                if isinstance(frame, frames.Orders):
                    self.orders += frame.orders
                if isinstance(frame, kind):
                    return frame

    async def until_ordered(self) -> frames.Order:
        while not self.orders:
            await self.hear(frames.Orders)
        return self.orders[0]

    async def fate(self) -> Fate:
        """Listen until the connection ends."""
        why = ""
        async with asyncio.timeout(PATIENCE_S):
            async for message in self.socket:
                if message.type is aiohttp.WSMsgType.BINARY:
                    frame = frames.decode_to_worker(message.data)
                    why = frame.why if isinstance(frame, frames.Release) else why
        return Fate(why, self.socket.close_code)


async def begin_round(fleet: Fleet, peer: Peer, step: int) -> tuple[asyncio.Task[list[Group]], frames.Order]:
    """A version, and a round of it: what plays it, and the first order of a worker that enters for it."""
    await fleet.publish(step)
    await peer.enter()
    playing = asyncio.create_task(play_round(fleet, step))
    return playing, await peer.until_ordered()


def tokens(
    lease: int,
    *,
    offset: int = 0,
    version: int = 0,
    ids: Sequence[int] = (7,),
    logprobs: Sequence[float] | None = None,
    count: int | None = None,
    ended: tuple[frames.Ended, ...] = (),
) -> frames.NewTokens:
    """A frame about one lease, as true or untrue as its parts."""
    cells = columns.pack_cells(ids, [-1.0] * len(ids) if logprobs is None else logprobs)
    return frames.NewTokens(
        1,
        columns.pack_column("<u8", [lease]),
        columns.pack_column("<u4", [offset]),
        columns.pack_column("<u4", [len(ids) if count is None else count]),
        columns.pack_column("<i4", [version]),
        cells,
        ended,
    )
