"""An answer crosses to the trainer once: what was sent to be scored is delivered by its number."""

import asyncio
from pathlib import Path

import aiohttp
import pytest
from msgspec.structs import replace
from tests.integration.live import CONFIG, PATIENCE_S, Live, check_right, honest_worker, manager, run, trainer

from polyrl.client import Group, Prompt, Sample
from polyrl.scheduling.core.parameters import DomainData
from polyrl.wire import columns, frames
from polyrl.wire.control import RunReply, RunRequest
from polyrl.wire.dial import Dialer

ONE_GROUP = replace(CONFIG, domains=(DomainData(name="d", prompts_per_step=1, num_prompts=50),))
NUM_SAMPLES = CONFIG.rounds.samples_per_prompt


class ScriptedTrainer:
    """A trainer made of frames: it supplies prompts by itself, and scores when it is told to."""

    def __init__(self, dialer: Dialer, session: str) -> None:
        self._dialer, self._session = dialer, session
        self._socket: aiohttp.ClientWebSocketResponse | None = None
        self._seq = 0
        self.to_score: dict[int, frames.ScoreThis] = {}
        self.num_bytes: dict[type, int] = {}
        """Of the frames that came, by kind."""

    async def dial(self) -> None:
        if self._socket is not None:
            await self._socket.close()
        self.to_score.clear()
        self._socket = await self._dialer.stream("/v1/trainer", self._session, frames.MAX_TRAINER_FRAME_BYTES)
        await self._say(frames.TrainerHello())

    async def begin(self) -> None:
        await self.dial()
        await self._say(frames.Published(self._next(), 0))
        await self._say(frames.RequestRound(self._next(), 0))

    async def score(self, sample: int) -> None:
        one = self.to_score.pop(sample)
        await self._say(frames.Scored(self._next(), sample, one.attempt, "scored", float(sample % 7), False, 0.0))

    async def until_to_score(self, num: int) -> dict[int, frames.SamplePayload]:
        while len(self.to_score) < num:
            await self._hear()
        return {sample: one.answer for sample, one in self.to_score.items()}

    async def settled(self) -> None:
        while not (isinstance(frame := await self._hear(), frames.Ack) and frame.seq >= self._seq):
            pass

    async def delivered(self) -> frames.Delivered:
        while not isinstance(frame := await self._hear(), frames.Delivered):
            pass
        return frame

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    async def _say(self, frame: frames.FromTrainer) -> None:
        assert self._socket is not None
        await self._socket.send_bytes(frames.encode(frame))

    async def _hear(self) -> frames.ToTrainer:
        assert self._socket is not None
        raw = await self._socket.receive_bytes()
        frame = frames.decode_to_trainer(raw)
        self.num_bytes[type(frame)] = self.num_bytes.get(type(frame), 0) + len(raw)
        match frame:
            case frames.Opened() if frame.groups:
                prompt = columns.pack_tokens([5, 6, 7])
                prompts = tuple(frames.PromptPayload(one.group, prompt, frames.Sampling()) for one in frame.groups)
                await self._say(frames.SupplyPrompts(self._next(), prompts))
            case frames.ScoreThese():
                self.to_score |= {one.answer.sample: one for one in frame.samples}
            case _:
                pass
        return frame


async def scripted(live: Live, dialer: Dialer) -> ScriptedTrainer:
    request = RunRequest(protocol=frames.PROTOCOL, config=ONE_GROUP, has_reward=True)
    opened = await dialer.post("/v1/run", request, RunReply)
    return ScriptedTrainer(dialer, opened.session)


def test_what_was_scored_is_delivered_without_its_tokens(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live), Dialer(live.url, live.token("admin")) as dialer:
            peer = await scripted(live, dialer)
            async with asyncio.timeout(PATIENCE_S):
                await peer.begin()
                texts = await peer.until_to_score(NUM_SAMPLES)
                for sample in texts:
                    await peer.score(sample)
                got = await peer.delivered()
            assert [one.is_kept for one in got.samples] == [True] * NUM_SAMPLES
            assert {one.sample: one.reward for one in got.samples} == {one: float(one % 7) for one in texts}
            assert not any(one.cells or one.segments for one in got.samples)
            assert peer.num_bytes[frames.Delivered] < peer.num_bytes[frames.ScoreThese] / 4

    run(scenario())


def test_what_was_scored_before_a_break_is_delivered_in_full(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live), Dialer(live.url, live.token("admin")) as dialer:
            peer = await scripted(live, dialer)
            async with asyncio.timeout(PATIENCE_S):
                await peer.begin()
                texts = await peer.until_to_score(NUM_SAMPLES)
                *before, last = texts
                for sample in before:
                    await peer.score(sample)
                await peer.settled()
                await peer.dial()
                assert list(await peer.until_to_score(1)) == [last]
                await peer.score(last)
                got = await peer.delivered()
            assert {one.sample for one in got.samples if one.is_kept} == {last}
            for one in got.samples:
                if not one.is_kept:
                    assert one == replace(texts[one.sample], reward=float(one.sample % 7))

    run(scenario())


@pytest.mark.parametrize("at", [1, 4, 8])
def test_a_trainer_whose_connection_breaks_while_it_scores_gets_every_answer_whole(tmp_path: Path, at: int):
    async def scenario() -> None:
        num_scored = 0
        prompts: dict[int, Prompt] = {}

        async with manager(tmp_path) as live, honest_worker(live):

            async def reward(sample: Sample) -> float:
                nonlocal num_scored
                num_scored += 1
                opened = live.service.lobby.run
                session = None if opened is None else opened.trainer
                if num_scored == at and session is not None and session.link is not None:
                    session.link.close("a break")
                return float(len(sample.tokens))

            async with trainer(live, reward=reward) as fleet:
                await fleet.publish(0)
                groups: list[Group] = [group async for group in fleet.round(0)]
                assert fleet._kept.get(0, {}) == {}
                await fleet.step_done(0)
            for group in groups:
                prompts[group.id] = Prompt([5, 6, 7, 8 + group.origin.prompt])
                assert [one.reward for one in group.samples] == [float(len(one.tokens)) for one in group.samples]
            check_right(groups, prompts)

    run(scenario())


def test_an_answer_that_was_not_kept_is_asked_for_by_dialling_again(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, trainer(live) as fleet:
            unknown = frames.SamplePayload(7, b"", (), "", 1.0, is_kept=True)
            with pytest.raises(ConnectionError, match="sample 7 was not sent to be scored on this connection"):
                await fleet._hear(frames.Delivered(0, 1, frames.Origin(0, 0, 0), (unknown,)))

    run(scenario())
