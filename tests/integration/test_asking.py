"""Questions beside a training run: both go on, the run trains what it would have, and all laws hold."""

import asyncio
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec import structs
from tests.integration.live import QUICK, Live, honest_worker, manager, play_round, run, trainer, until

from polyrl.manager.settings import ServeSettings
from polyrl.scheduling.invariants import check

STEPS = 3
TOKENS = 20


def asker(live: Live) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{live.url}/v1", api_key=live.token("generate"), max_retries=0, timeout=20)


async def ask(client: openai.AsyncOpenAI, **others: Any) -> list[int]:
    fields: Any = {"model": "polyrl", "prompt": [5, 6, 7], "max_tokens": TOKENS, "seed": 1, **others}
    done = await client.completions.create(**fields, extra_body={"return_token_ids": True, "ignore_eos": True})
    return done.choices[0].token_ids  # type: ignore[attr-defined]


def test_a_training_run_and_questions_share_a_fleet_and_each_gets_what_is_its_own(tmp_path: Path):
    async def scenario() -> None:
        settings = structs.replace(QUICK, serve=ServeSettings(max_samples=3))
        async with manager(tmp_path, settings) as live, honest_worker(live), honest_worker(live, name="b"):
            answers: list[list[int]] = []
            is_over = asyncio.Event()

            async def keep_asking(client: openai.AsyncOpenAI) -> None:
                while not is_over.is_set():
                    answers.append(await ask(client))

            async with trainer(live) as fleet, asker(live) as client:
                await fleet.publish(0)
                asking = [asyncio.create_task(keep_asking(client)) for _ in range(3)]
                for step in range(STEPS):
                    groups = await play_round(fleet, step)
                    assert [len(group.samples) for group in groups] == [4, 4]
                    await fleet.publish(step + 1)
                is_over.set()
                await asyncio.gather(*asking)
            lobby = live.service.lobby
            check(lobby.need_run().scheduler, lobby.need_run().scheduler.now)
            ledger = lobby.need_run().scheduler.ledger
            assert (ledger.prompts_trained, ledger.samples_trained) == (2 * STEPS, 8 * STEPS)
            assert ledger.samples_answered == len(answers) >= STEPS
            assert ledger.tokens_answered == TOKENS * len(answers)
            assert len({tuple(one) for one in answers}) == 1, "the same seed gave other tokens"
            assert not lobby.need_run().questions
            assert not lobby.need_run().payload.prompts.keys() - lobby.need_run().desk.groups.keys()

    run(scenario(), 60.0)


def test_token_ids_need_no_tokenizer_and_text_is_refused_without_one(tmp_path: Path):
    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live), asker(live) as client:
            with pytest.raises(openai.InternalServerError, match="no run is open"):
                await ask(client)
            async with trainer(live) as fleet:
                await fleet.publish(0)
                assert len(await ask(client)) == TOKENS
                for fields in ({"prompt": "text"}, {"stop": "x"}):
                    with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                        await ask(client, **fields)
                with pytest.raises(openai.BadRequestError, match="no tokenizer"):
                    await client.chat.completions.create(model="polyrl", messages=[{"role": "user", "content": "x"}])

    run(scenario())


def test_an_answer_that_no_worker_writes_is_given_up_and_a_worker_that_comes_in_time_writes_it(tmp_path: Path):
    async def scenario() -> None:
        settings = structs.replace(QUICK, serve=ServeSettings(token_timeout_s=3.0))  # time enough for one to join
        async with manager(tmp_path, settings) as live, asker(live) as client, trainer(live) as fleet:
            await fleet.publish(0)
            with pytest.raises(openai.InternalServerError, match=r"no worker brought a token for 3 s"):
                await ask(client)
            await until(lambda: not live.service.lobby.need_run().questions, "it is withdrawn")
            waiting = asyncio.create_task(ask(client))
            async with honest_worker(live, name="late"):
                assert len(await waiting) == TOKENS

    run(scenario())


def test_clients_that_ask_without_a_pause_leave_a_round_half_of_the_places(tmp_path: Path):
    """With more questions than places, a round got none, for as long as there were any."""

    async def scenario() -> None:
        async with manager(tmp_path) as live, honest_worker(live), trainer(live) as fleet, asker(live) as client:
            await fleet.publish(0)
            num_answered = 0

            async def keep_asking() -> None:
                nonlocal num_answered
                while True:
                    await ask(client, n=4)
                    num_answered += 1

            asking = [asyncio.create_task(keep_asking()) for _ in range(8)]
            await until(lambda: num_answered > 8, "clients are answered")
            for step in range(2):
                async with asyncio.timeout(15.0):
                    groups = await play_round(fleet, step)
                assert [len(group.samples) for group in groups] == [4, 4]
                await fleet.publish(step + 1)
            num_before = num_answered
            await until(lambda: num_answered > num_before + 8, "clients are still answered")
            for one in asking:
                one.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    run(scenario(), 60.0)
