"""Conversations that the bench of episodes plays, and its processes: an engine alone, or a worker that has it.

    python -m polyrl.bench.conversations straight TALK              plays them at an engine in its own process
    python -m polyrl.bench.conversations work TALK URL TOKEN NAME   is a worker with that engine

A conversation has several turns; the prompt of each is all that was said before and a few given tokens. Lengths are a
function of the conversation and the turn, so both ways draw as many tokens. Lines are JSON; a process says {} when it
is ready, and ends when its input does.
"""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
from msgspec import Struct

from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.engines.builtin.engine import BuiltinEngine
from polyrl.engines.engine import EngineStats, Job
from polyrl.ids import LeaseId, SampleId
from polyrl.run.event_loop import run_loop
from polyrl.scheduling.rules.order import mix64
from polyrl.wire.credentials import read_token_file
from polyrl.wire.dial import Dialer
from polyrl.wire.frames import Sampling
from polyrl.worker.agent import WorkerAgent, WorkerOptions

_FIRST_ID = 3
"""Ids below it have a meaning in many vocabularies."""


class Talk(Struct, frozen=True, kw_only=True):
    """The conversations, and the engine that they are held with."""

    model: str
    vocab: int
    slots: int
    kv_tokens: int
    num_turns: int
    new: int
    """The mean tokens of an answer; lengths lie between half of it and one and a half times it."""
    first: int
    """Tokens of the first prompt."""
    given: int
    """Tokens that come with every further turn."""
    compile: bool = True

    @property
    def longest(self) -> int:
        return self.first + self.num_turns * (self.new + self.new // 2 + self.given)


class Phase(Struct, frozen=True, kw_only=True):
    """A part of the measurement."""

    at_once: int
    """Conversations."""
    num_turns: int
    new: int
    as_chat: bool = False


class TimedTurn(NamedTuple):
    began: float
    ended: float
    num_prompt: int
    num_new_to_it: int
    """Tokens of the prompt that no cache can hold: given ones, and the last one drawn before them."""


Draw = Callable[[list[int], int], Awaitable[Sequence[int]]]
"""(prompt, number of tokens) -> the answer."""


def length_of(phase: Phase, index: int, turn: int) -> int:
    return max(1, phase.new // 2 + mix64(index, turn) % (phase.new + 1))


def ids_of(talk: Talk, number: int, index: int, turn: int) -> list[int]:
    return [_FIRST_ID + mix64(index, turn, at) % (talk.vocab - _FIRST_ID) for at in range(number)]


async def converse(talk: Talk, phase: Phase, index: int, draw: Draw, turns: list[TimedTurn]) -> None:
    """Hold one conversation, and note its turns."""
    said = ids_of(talk, talk.first, index, -1)
    num_new = len(said)
    for turn in range(phase.num_turns):
        began = time.perf_counter()
        drawn = await draw(said, length_of(phase, index, turn))
        turns.append(TimedTurn(began, time.perf_counter(), len(said), num_new))
        said = [*said, *drawn, *ids_of(talk, talk.given, index, turn)]
        num_new = 1 + talk.given


class Figures(NamedTuple):
    """Read off the turns of one phase."""

    turns_per_s: float
    p50_ms: float
    p99_ms: float
    num_prompt: int
    num_new: int


def read_off(turns: Sequence[TimedTurn]) -> Figures:
    """Read off the figures. The rate is that of the middle: not all conversations run at the beginning, nor at the
    end."""
    ends = sorted(one.ended for one in turns)
    low, high = len(ends) // 10, len(ends) - 1 - len(ends) // 10
    took = sorted(one.ended - one.began for one in turns)
    return Figures(
        (high - low) / max(1e-9, ends[high] - ends[low]),
        took[len(took) // 2] * 1e3,
        took[min(len(took) - 1, len(took) * 99 // 100)] * 1e3,
        sum(one.num_prompt for one in turns),
        sum(one.num_new_to_it for one in turns),
    )


# Inside such a process


def make_engine(talk: Talk) -> BuiltinEngine:
    return BuiltinEngine(
        BuiltinConfig(
            model=talk.model,
            slots=talk.slots,
            kv_tokens=talk.kv_tokens,
            max_context=talk.longest + 1,
            compile=talk.compile,
        )
    )


class AskedEngine:
    """An engine that is asked straight: its sink, and a future for every answer."""

    def __init__(self, engine: BuiltinEngine) -> None:
        self.engine = engine
        self._answers: dict[LeaseId, tuple[list[int], asyncio.Future[list[int]]]] = {}
        self._last = 0

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: int) -> None:
        self._answers[lease][0].extend(tokens)

    def ended(self, lease: LeaseId, reason: str, detail: str = "") -> None:
        drawn, answer = self._answers.pop(lease)
        if reason in ("stop", "length"):
            answer.set_result(drawn)
        else:
            answer.set_exception(RuntimeError(f"{reason}: {detail}"))

    async def draw(self, prompt: list[int], num_tokens: int) -> list[int]:
        self._last += 1
        lease = LeaseId(self._last)
        answer: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
        self._answers[lease] = [], answer
        self.engine.generate(Job(lease, SampleId(lease), prompt, [], num_tokens, lease, Sampling(ignore_eos=True)))
        return await answer

    async def play(self, talk: Talk, phase: Phase, indexes: Iterable[int]) -> list[TimedTurn]:
        turns: list[TimedTurn] = []
        gate = asyncio.Semaphore(phase.at_once)

        async def one(index: int) -> None:
            async with gate:
                await converse(talk, phase, index, self.draw, turns)

        await asyncio.gather(*map(one, indexes))
        return turns


def counts(stats: EngineStats) -> dict[str, float]:
    return {"prefilled": stats.num_prefilled, "reused": stats.num_reused, "cpu_s": time.process_time()}


async def play_straight(talk: Talk) -> None:
    asked = AskedEngine(make_engine(talk))
    await asked.engine.start(asked)
    _say({})
    try:
        while line := await asyncio.to_thread(sys.stdin.readline):
            wish = msgspec.json.decode(line)
            phase = msgspec.convert(wish["phase"], Phase)
            turns = await asked.play(talk, phase, range(wish["first"], wish["first"] + wish["count"]))
            _say({"turns": turns, **counts(asked.engine.stats())})
    finally:
        await asked.engine.close()


async def work(talk: Talk, url: str, token_file: str, name: str) -> None:
    engine = make_engine(talk)
    agent = WorkerAgent(engine, Dialer(url, read_token_file(Path(token_file))), WorkerOptions(name))
    loop = asyncio.get_running_loop()
    life = loop.create_task(agent.run())

    def answer() -> None:
        for _ in sys.stdin:
            _say(counts(engine.stats()))
        loop.call_soon_threadsafe(life.cancel)

    threading.Thread(target=answer, daemon=True).start()
    _say({})
    await asyncio.wait([life])


def _say(what: dict[str, Any]) -> None:
    print(msgspec.json.encode(what).decode(), flush=True)


def main(argv: list[str]) -> int:
    role, settings, *where = argv
    talk = msgspec.json.decode(settings, type=Talk)
    run_loop(play_straight(talk) if role == "straight" else work(talk, *where))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
