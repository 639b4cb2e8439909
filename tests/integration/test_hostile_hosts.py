"""Hosts that lie, with a valid host token: each is refused with a reason and named, and the honest host beside it plays
all episodes to their end."""

import asyncio
import contextlib
import math
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp
import msgspec
import pytest
import requests
from tests.integration.live import MODEL, PATIENCE_S, Live, honest_worker, manager, play_round, run, trainer, until
from tests.integration.test_episodes import CONFIG, EchoEnvironment, check, host, prompt_of

from polyrl.ids import HostName
from polyrl.scheduling.core.parameters import EnvironmentRules
from polyrl.wire import columns, frames, host_frames
from polyrl.wire.control import SESSION_HEADER, HostJoinReply, HostJoinRequest
from polyrl.wire.dial import Dialer
from polyrl.wire.host_frames import EndEpisode, HeldEpisode, HostHello, MakeCall

SHORT = EnvironmentRules(turn_timeout_s=0.7, host_timeout_s=1.5)
SHORT_CONFIG = msgspec.structs.replace(CONFIG, environments=SHORT)


class LyingHost:
    """A connection with a host's session, on which a test says whatever it wants."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self.played: list[host_frames.EpisodeOrder] = []
        self.release: frames.Release | None = None

    async def say(self, frame: msgspec.Struct) -> None:
        with contextlib.suppress(ConnectionError, aiohttp.ClientError):
            await self._socket.send_bytes(frames.encode(frame))

    async def listen(self) -> None:
        async for message in self._socket:
            if message.type is not aiohttp.WSMsgType.BINARY:
                return
            frame = host_frames.decode_to_host(message.data)
            if isinstance(frame, host_frames.Play):
                self.played += frame.episodes
            elif isinstance(frame, frames.Release):
                self.release = frame


@asynccontextmanager
async def liar(live: Live, slots: int = 4, name: str = "liar", *, hello: bool = True) -> AsyncIterator[LyingHost]:
    async with Dialer(live.url, live.token("host")) as dialer:
        request = HostJoinRequest(name=name, protocol=frames.PROTOCOL, environment="echo", slots=slots)
        joined = await dialer.post("/v1/hosts/join", request, HostJoinReply)
        socket = await dialer.stream("/v1/host", joined.session, frames.MAX_TRAINER_FRAME_BYTES)
        peer = LyingHost(socket)
        listening = asyncio.create_task(peer.listen())
        try:
            if hello:
                await peer.say(HostHello(()))
            yield peer
        finally:
            listening.cancel()
            await socket.close()


def call(order: host_frames.EpisodeOrder, number: int = 0, base: int = -1, kept: int = 0, ids: list[int] | None = None):
    tokens = columns.pack_tokens([5, 6, 7] if ids is None else ids)
    return MakeCall(order.sample, order.attempt, number, base, kept, tokens, 20)


Lie = Callable[[host_frames.EpisodeOrder], msgspec.Struct]
LIES: dict[str, tuple[Lie, str]] = {
    "a token id beyond the vocabulary": (lambda one: call(one, ids=[5, 10**6]), "call"),
    "a token id below 0": (lambda one: call(one, ids=[-3]), "call"),
    "half a token": (lambda one: MakeCall(one.sample, one.attempt, 0, -1, 0, b"abc", 5), "call"),
    "no token at all": (lambda one: call(one, ids=[]), "call"),
    "a call before the one before it": (lambda one: call(one, number=3), "call"),
    "a call that goes on from itself": (lambda one: call(one, base=0), "call"),
    "tokens of no call": (lambda one: call(one, kept=9), "call"),
    "a call number beyond all": (
        lambda one: _Raw("call", [one.sample, one.attempt, 1 << 20, -1, 0, b"", 1, [], []]),
        "frame",
    ),
    "a reward that is no number": (
        lambda one: EndEpisode(one.sample, one.attempt, "scored", 0, math.nan),
        "frame",
    ),
    "a part of a reward that is no number": (
        lambda one: EndEpisode(one.sample, one.attempt, "scored", 0, 1.0, {"x": math.inf}),
        "reward",
    ),
    "a second hello": (lambda one: HostHello(()), "order"),
    "an unknown frame": (lambda one: _Raw("explode", []), "frame"),
}


class _Raw(msgspec.Struct, array_like=True):
    """A frame that no honest host can make."""

    tag: str
    rest: list

    def __iter__(self):
        return iter((self.tag, *self.rest))


def encoded(frame: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(list(frame)) if isinstance(frame, _Raw) else frames.encode(frame)


@pytest.mark.parametrize("lie", LIES)
def test_a_host_that_says_what_cannot_be_true_is_refused_and_its_episodes_are_played_elsewhere(tmp_path, lie):
    make, kind = LIES[lie]

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            liar(live) as peer,
        ):
            await fleet.publish(0)
            round_ = asyncio.create_task(play_round(fleet, 0))
            await until(lambda: bool(peer.played), "the liar was given an episode")
            await peer._socket.send_bytes(encoded(make(peer.played[0])))
            await until(lambda: live.refused.get(kind, 0) == 1, f"it is refused for {kind}: {live.refused}")
            assert HostName("liar") not in live.service.lobby.hosts
            async with host(live, EchoEnvironment(), "honest"):
                check(await round_)
            await until(lambda: peer.release is not None, "it was told so")
            assert peer.release is not None
            assert peer.release.in_anger

    run(scenario(), 60.0)


def test_a_frame_before_the_hello_ends_the_session(tmp_path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of),
            liar(live, hello=False) as peer,
        ):
            await peer.say(MakeCall(1, 1, 0, -1, 0, b"", 1))
            await until(lambda: live.refused.get("order", 0) == 1, "it is refused")

    run(scenario())


def test_a_host_that_claims_many_places_and_sits_on_its_episodes_gets_few_and_is_given_up(tmp_path):
    async def scenario() -> None:
        config = msgspec.structs.replace(
            SHORT_CONFIG, domains=(msgspec.structs.replace(CONFIG.domains[0], prompts_per_step=8),)
        )
        async with (
            manager(tmp_path) as live,
            trainer(live, config, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, EchoEnvironment(), "honest"),
            liar(live, slots=65_536) as peer,
        ):
            await fleet.publish(0)

            async def beat() -> None:
                while True:
                    await peer.say(host_frames.HostReport(0))
                    await asyncio.sleep(0.1)

            beating = asyncio.create_task(beat())
            groups = await play_round(fleet, 0)
            beating.cancel()
            assert sum(len(group.samples) for group in groups) == 32
            assert len(peer.played) <= 20  # 8 to begin with, then one at a time
            assert peer.release is not None
            assert "none of its 8 episodes has moved" in peer.release.why and not peer.release.rejoin

    run(scenario(), 60.0)


def test_a_host_speaks_for_its_own_episodes_alone(tmp_path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
            host(live, EchoEnvironment(), "honest"),
            liar(live, slots=1) as peer,
        ):
            await fleet.publish(0)
            round_ = asyncio.create_task(play_round(fleet, 0))
            await until(lambda: bool(peer.played), "the liar was given an episode")
            others = [one for one in live.service.lobby.need_run().desk.samples if one != peer.played[0].sample]
            for sample in others:
                await peer.say(EndEpisode(sample, 1, "scored", 3, 1000.0))
                await peer.say(MakeCall(sample, 1, 0, -1, 0, columns.pack_tokens([1]), 1))
            await peer.say(EndEpisode(peer.played[0].sample, 1, "failed", 0, why="\x1b[31mgone\n"))
            check(await round_)

    run(scenario(), 60.0)


def test_a_flood_of_frames_is_refused(tmp_path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live, CONFIG, prompts=prompt_of), liar(live) as peer:
            for _ in range(3000):
                await peer.say(host_frames.HostReport(0))
            await until(lambda: live.refused.get("flood", 0) == 1, "it is refused")

    run(scenario())


def test_a_host_that_says_again_and_again_that_it_leaves_fills_no_journal(tmp_path):
    async def scene() -> None:
        async with manager(tmp_path) as live, honest_worker(live), trainer(live, CONFIG) as fleet, liar(live) as peer:
            await fleet.publish(0)
            playing = asyncio.create_task(play_round(fleet, 0))
            await until(lambda: len(peer.played) > 0, "it plays episodes, and so stays a while")
            for _ in range(300):
                await peer.say(frames.Leaving("\U0001f600" * 2000))
            await peer.say(frames.Goodbye("it is over"))
            await until(lambda: peer.release is not None, "it is let go")
            playing.cancel()

    run(scene())
    assert sum(one.stat().st_size for one in tmp_path.rglob("*.bin")) < 100_000


def test_a_host_cannot_say_that_it_plays_more_than_it_has_places(tmp_path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of),
            liar(live, hello=False) as peer,
        ):
            await peer.say(HostHello(tuple(HeldEpisode(one, 1) for one in range(1000))))
            await until(lambda: live.refused.get("episode", 0) == 1, "it is refused")

    run(scenario())


def test_each_token_opens_its_own_door_alone(tmp_path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live, CONFIG, prompts=prompt_of):
            host_join = HostJoinRequest(name="h", protocol=frames.PROTOCOL, environment="echo", slots=1)

            def ask(path: str, scope: str, body: bytes = b"{}") -> int:
                url = f"{live.url}{path}"
                return requests.post(url, data=body, headers=live.headers(scope), timeout=PATIENCE_S).status_code

            body = msgspec.json.encode(host_join)
            assert await asyncio.to_thread(ask, "/v1/hosts/join", "worker", body) == 403
            assert await asyncio.to_thread(ask, "/v1/hosts/join", "generate", body) == 403
            assert await asyncio.to_thread(ask, "/v1/join", "host") == 403
            assert await asyncio.to_thread(ask, "/v1/run", "host") == 403
            assert await asyncio.to_thread(ask, "/v1/hosts/x/drain", "host") == 403
            assert await asyncio.to_thread(ask, "/v1/hosts/join", "host", body) == 200

    run(scenario())


def test_a_host_of_another_environment_is_told_which_one_the_run_has(tmp_path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live, CONFIG, prompts=prompt_of):
            body = HostJoinRequest(name="h", protocol=frames.PROTOCOL, environment="maze", slots=1)

            def ask() -> requests.Response:
                url = f"{live.url}/v1/hosts/join"
                return requests.post(
                    url, data=msgspec.json.encode(body), headers=live.headers("host"), timeout=PATIENCE_S
                )

            answer = await asyncio.to_thread(ask)
            assert answer.status_code == 409
            assert answer.json()["error"] == "host 'h' plays 'maze'; expected 'echo'"

    run(scenario())


def test_the_name_of_a_connected_host_is_not_given_to_another(tmp_path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live, CONFIG, prompts=prompt_of), liar(live, name="mine"):
            await until(lambda: live.service.lobby.hosts[HostName("mine")].greeted, "it is connected")
            body = HostJoinRequest(name="mine", protocol=frames.PROTOCOL, environment="echo", slots=1)

            def ask() -> int:
                headers = {**live.headers("host"), SESSION_HEADER: "0" * 32}
                url = f"{live.url}/v1/hosts/join"
                return requests.post(
                    url, data=msgspec.json.encode(body), headers=headers, timeout=PATIENCE_S
                ).status_code

            assert await asyncio.to_thread(ask) == 423

    run(scenario())


def test_a_call_that_is_made_again_with_another_prompt_is_refused(tmp_path):
    """Otherwise each would be drawn, journalled and thrown away, for ever."""

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
            honest_worker(live),
        ):
            await fleet.publish(0)
            round_ = asyncio.create_task(play_round(fleet, 0))
            async with liar(live) as peer:
                await until(lambda: bool(peer.played), "it has an episode")
                order = peer.played[0]
                await peer.say(call(order))
                calls = live.service.lobby.need_run().payload.tokens_of(order.sample).calls  # type: ignore[arg-type]
                await until(lambda: bool(calls) and calls[0].end >= 0, "its call is answered")
                await peer.say(call(order, ids=[8, 9]))
                await until(lambda: peer.release is not None, "it is refused")
                assert peer.release is not None and "was made with another prompt" in peer.release.why
            async with host(live, EchoEnvironment()):
                check(await round_)

    run(scenario(), 60.0)


def test_parts_of_a_reward_become_no_metric_of_any_name(tmp_path):
    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, CONFIG, prompts=prompt_of, answers=MODEL) as fleet,
        ):
            await fleet.publish(0)
            round_ = asyncio.create_task(play_round(fleet, 0))
            async with liar(live) as peer:
                await until(lambda: bool(peer.played), "it has an episode")
                order = peer.played[0]
                await peer.say(EndEpisode(order.sample, order.attempt, "scored", 0, 1.0, {"a\nb": 1.0}))
                await until(lambda: peer.release is not None, "it is refused")
            round_.cancel()

    run(scenario(), 60.0)
