"""What does not fit into one frame travels in several, and arrives whole."""

import asyncio
import threading
import time
from pathlib import Path

import msgspec
from tests.integration.live import CONFIG, Live, Peer, manager, play_round, prompt_of, run, tokens, trainer, until

from polyrl.client import Group, Prompt
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig
from polyrl.scheduling.parts import credit
from polyrl.wire import frames
from polyrl.wire.columns import PIECE_BYTES
from polyrl.wire.control import RunReply, RunRequest
from polyrl.wire.dial import Dialer

LONG = msgspec.structs.replace(
    CONFIG,
    domains=(DomainData(name="d", prompts_per_step=1, num_prompts=50),),
    max_new_tokens=400_000,
    rounds=RoundsConfig(samples_per_prompt=3),
)
ANSWER = [7] * 300_000
NUM_CELL_BYTES = 8 * len(ANSWER)


async def answer(peer: Peer) -> None:
    while len(peer.orders) < 3:
        await peer.hear(frames.Orders)
    for order in peer.orders:
        await peer.say(tokens(order.lease, ids=ANSWER, ended=(frames.Ended(order.lease, len(ANSWER), "stop"),)))


async def frames_for_a_trainer(live: Live) -> list[frames.Delivered]:
    """As another trainer would be sent them, until its round is closed."""
    delivered: list[frames.Delivered] = []
    async with Dialer(live.url, live.token("admin")) as dialer:
        opened = await dialer.post("/v1/run", RunRequest(protocol=frames.PROTOCOL, config=LONG), RunReply)
        socket = await dialer.stream("/v1/trainer", opened.session, 1 << 28)
        await socket.send_bytes(frames.encode(frames.TrainerHello()))
        while not isinstance(frame := frames.decode_to_trainer(await socket.receive_bytes()), frames.Closed):
            if isinstance(frame, frames.Delivered):
                delivered.append(frame)
    return delivered


def test_a_group_larger_than_a_frame_is_delivered_in_parts(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, Peer(live) as peer:
            async with trainer(live, LONG) as fleet:
                await fleet.publish(0)
                await peer.enter()
                answering = asyncio.create_task(answer(peer))
                groups: list[Group] = [group async for group in fleet.round(0)]
                await answering
            assert [[len(sample.tokens) for sample in group.samples] for group in groups] == [[len(ANSWER)] * 3]
            assert len({sample.id for sample in groups[0].samples}) == 3
            parts = await frames_for_a_trainer(live)
            assert [(len(part.samples), part.more) for part in parts] == [(2, True), (1, False)]
            assert 2 * NUM_CELL_BYTES > PIECE_BYTES > NUM_CELL_BYTES

    run(scenario())


def test_orders_and_prompts_larger_than_a_frame_come_in_several(tmp_path: Path):
    config = msgspec.structs.replace(LONG, domains=(DomainData(name="d", prompts_per_step=3, num_prompts=50),))
    prompt = Prompt([5] * (PIECE_BYTES // 6))

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            trainer(live, config, prompts=lambda *_: prompt) as fleet,
            Peer(live, slots=9) as peer,
        ):
            await fleet.publish(0)
            await peer.enter()
            playing = asyncio.create_task(play_round(fleet, 0))
            sizes: list[int] = []
            while len(peer.orders) < credit.START:
                sizes.append(len(frames.encode(await peer.hear(frames.Orders))))
            assert len({order.lease for order in peer.orders}) == credit.START
            assert len(sizes) >= 4
            assert max(sizes) < 2 * PIECE_BYTES
            playing.cancel()

    run(scenario())


def test_prompts_that_take_their_time_hold_nobody_up(tmp_path: Path):
    """The connection lives, and samples whose prompts are there begin, while the next prompt is still made."""
    config = msgspec.structs.replace(CONFIG, domains=(DomainData(name="d", prompts_per_step=3, num_prompts=50),))

    made: list[int] = []
    goes_on = threading.Event()

    def slow(domain: int, prompt: int, epoch: int) -> Prompt:
        if made:
            assert goes_on.wait(20.0), "the loop was held up"
        else:
            time.sleep(0.4)  # longer than is waited for others to go with it
        made.append(prompt)
        return prompt_of(domain, prompt, epoch)

    async def scenario() -> None:
        async with (
            manager(tmp_path) as live,
            Peer(live, slots=12) as peer,
            trainer(live, config, prompts=slow) as fleet,
        ):
            await fleet.publish(0)
            await peer.enter()
            playing = asyncio.create_task(play_round(fleet, 0))
            await peer.hear(frames.Orders)
            assert len(live.service.lobby.need_run().payload.prompts) == 1
            await fleet.status()
            await fleet.publish(1)
            await fleet.settled()
            assert len(made) == 1
            goes_on.set()
            await until(lambda: len(live.service.lobby.need_run().payload.prompts) == 3, "all are there")
            playing.cancel()

    run(scenario())


def test_a_prompt_that_cannot_be_made_ends_the_trainer(tmp_path: Path):
    def broken(domain: int, prompt: int, epoch: int) -> Prompt:
        raise KeyError("no such prompt")

    async def scenario() -> str:
        async with manager(tmp_path) as live, trainer(live, prompts=broken) as fleet:
            await fleet.publish(0)
            try:
                await play_round(fleet, 0)
            except KeyError as error:
                return str(error)
        return ""

    assert "no such prompt" in run(scenario())
