"""How fast episodes are on this machine: turns a second through manager and worker, beside the engine alone.

The same conversations (conversations.py) are held in turn at an engine in a process of its own, and through a manager
process, a worker process with the same engine, and a host in this process. Both are there all the time and take turns,
so neighbours on the machine disturb them alike; `share` is the middle one of the ratios of neighbouring runs.

- `turns_per_s`: twice as many conversations as the engine has slots, so that one always waits.
- `share_of_cpu`: the same for turns a CPU-second of the engine's process. On a CPU, where the engine never idles, it
  says what steps with an empty slot and the worker's own work cost, also on a machine that others use.
- `chats`: the same conversations as messages, at a chat route of the host's front, with a tokenizer and a template of
  as many tokens: what HTTP, JSON and templates cost.
- `turn_ms`: one conversation at a time, with short answers: what a turn takes more through the fleet.
- `prefilled_again`: tokens that the engine computed although they had been computed before, as a share of all prompts'.
- `death`: the same while the worker is killed on the way and another one joins.
"""

import asyncio
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp
import msgspec

from polyrl.bench import conversations
from polyrl.bench.chats import chat, chat_text
from polyrl.bench.conversations import Figures, Phase, Talk, TimedTurn, converse, read_off
from polyrl.bench.engine import Work, make_model
from polyrl.bench.machine import commit, cpu
from polyrl.client import Fleet, Prompt, connect
from polyrl.engines.builtin.config import MAX_SLOTS
from polyrl.errors import UserError
from polyrl.hosts.agent import HostAgent, HostOptions
from polyrl.hosts.episode import CallLimits, Episode, EpisodeEnd
from polyrl.hosts.front import HostFront
from polyrl.run.event_loop import run_loop
from polyrl.run.processes import ManagerProcess, terminate_with_parent
from polyrl.scheduling.core.parameters import DomainData, RoundsConfig, SchedulerConfig
from polyrl.wire.credentials import read_token_file
from polyrl.wire.dial import Dialer
from polyrl.wire.frames import Sampling

GOALS = {"share": 0.95, "prefilled_again": 0.05}
_ENVIRONMENT = "conversations"
_GIVEN = 8
_PATIENCE_S = 120.0
_SHORT = 4
"""Tokens of an answer whose latency is looked at."""
_SHORT_TURNS = 2


class EpisodeWork(NamedTuple):
    arch: str | None
    model: str | None
    slots: int = 8
    prompt: int = 64
    new: int = 24
    num_turns: int = 4
    num_repeats: int = 3
    compile: bool = True

    @property
    def num_conversations(self) -> int:
        return 3 * self.slots


def measure(work: EpisodeWork) -> dict[str, Any]:
    """Raises UserError for work that the engine or the model cannot do."""
    if work.slots > MAX_SLOTS:
        raise UserError(f"--batch: {work.slots}, expected at most {MAX_SLOTS}")
    with tempfile.TemporaryDirectory(prefix="polyrl-bench-") as folder:
        talk = prepare(work, Path(folder) / "model")
        return run_loop(_measure(work, talk, Path(folder)))


def prepare(work: EpisodeWork, folder: Path) -> Talk:
    """Write the model where both processes find it."""
    import torch

    from polyrl.engines.builtin.quiet import quiet

    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = make_model(Work(work.arch, work.model, work.slots, work.prompt, work.new), "cpu")
    if work.model is None:
        with quiet():
            model.save_pretrained(folder)
    talk = Talk(
        model=work.model or str(folder),
        vocab=model.config.vocab_size,
        slots=work.slots,
        kv_tokens=0,
        num_turns=work.num_turns,
        new=work.new,
        first=work.prompt,
        given=_GIVEN,
        compile=work.compile,
    )
    most = model.config.max_position_embeddings
    if talk.longest >= most:
        raise UserError(f"--prompt, --new and --turns: up to {talk.longest} tokens, and the model's context is {most}")
    return msgspec.structs.replace(talk, kv_tokens=(talk.longest + 64) * 3 * work.slots)


# The fleet


class ConversationEnvironment:
    """Holds the conversations of a phase, as many at once as it says."""

    name: str = _ENVIRONMENT
    num_tasks: int | None = None
    max_at_once: int | None = None
    worn_out: str = ""

    def __init__(self, talk: Talk) -> None:
        self._talk = talk
        self._front = HostFront(max_context=talk.longest + 1, text=chat_text(talk))
        self._client: aiohttp.ClientSession | None = None
        self.turns: list[TimedTurn] = []
        self.begin(Phase(at_once=1, num_turns=1, new=1))

    def begin(self, phase: Phase) -> None:
        self._phase, self._gate, self.turns = phase, asyncio.Semaphore(phase.at_once), []

    async def start(self) -> None:
        await self._front.start()
        self._client = aiohttp.ClientSession()

    async def close(self) -> None:
        if self._client is not None:
            await self._client.close()
        await self._front.close()

    async def play(self, episode: Episode) -> EpisodeEnd:
        async def draw(prompt: list[int], num_tokens: int) -> list[int]:
            return (await episode.call(prompt, CallLimits(max_tokens=num_tokens))).tokens

        async with self._gate:
            if self._phase.as_chat:
                assert self._client is not None
                with self._front.open(episode) as opened:
                    await chat(self._talk, self._phase, episode.index, self._client, opened.base_url, self.turns)
            else:
                await converse(self._talk, self._phase, episode.index, draw, self.turns)
        return EpisodeEnd(reward=0.0, num_turns=self._phase.num_turns)


class ChildProcess:
    """A process of conversations.py."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def request(self, wish: dict[str, Any]) -> dict[str, Any]:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(wish) + b"\n")
        return await self.hear()

    async def hear(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = await self.process.stdout.readline()
        if not line:
            raise UserError(f"a process of the bench ended with {await self.process.wait()}")
        return msgspec.json.decode(line)


@asynccontextmanager
async def child(role: str, *arguments: str) -> AsyncIterator[ChildProcess]:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", conversations.__name__, role, *arguments),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        limit=1 << 26,
        preexec_fn=terminate_with_parent,
    )
    try:
        yield ChildProcess(process)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


class Rig:
    """Both ways, ready. A phase is a round of the run."""

    def __init__(self, work: EpisodeWork, talk: Talk, folder: Path) -> None:
        self.work, self.talk, self._run_dir = work, talk, folder / "run"
        (self._run_dir / "logs").mkdir(parents=True)
        self._environment = ConversationEnvironment(talk)
        self._step = 0
        self.straight_cpu_s = 0.0
        self._stack = AsyncExitStack()
        self._url = ""

    async def __aenter__(self) -> "Rig":
        enter = self._stack.enter_async_context
        try:
            self.manager = ManagerProcess(self._run_dir, "127.0.0.1", 0)
            self._stack.push_async_callback(self.manager.stop)
            self._url = (await self.manager.start()).url
            self.straight = await enter(child("straight", self._packed))
            await self.straight.hear()
            self.fleet: Fleet = await enter(self._connect())
            await self.fleet.publish(0)
            self._stack.push_async_callback(self._stop_host, asyncio.create_task(self._host().run()))
            self.worker = await self.start_worker("w0")
        except BaseException:
            await self._stack.aclose()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stack.aclose()

    @property
    def _packed(self) -> str:
        return msgspec.json.encode(self.talk).decode()

    def _connect(self) -> Any:
        num = self.work.num_conversations
        config = SchedulerConfig(
            domains=(DomainData(name="d", prompts_per_step=num, num_prompts=1_000_000, environment=_ENVIRONMENT),),
            max_new_tokens=self.talk.longest,
            max_staleness=1000,
            rounds=RoundsConfig(samples_per_prompt=1),
        )
        prompt = Prompt([], Sampling(ignore_eos=True))
        return connect(self._url, self._token("admin"), config, prompts=lambda *_: prompt)

    def _token(self, scope: str) -> str:
        return read_token_file(self._run_dir / f"{scope}.token")

    def _host(self) -> HostAgent:
        options = HostOptions("bench", slots=self.work.num_conversations)
        return HostAgent(self._environment, Dialer(self._url, self._token("host")), options)

    @staticmethod
    async def _stop_host(life: "asyncio.Task[Any]") -> None:
        life.cancel()
        await asyncio.wait([life])

    async def start_worker(self, name: str) -> ChildProcess:
        token = str(self._run_dir / "worker.token")
        worker = await self._stack.enter_async_context(child("work", self._packed, self._url, token, name))
        await worker.hear()
        return worker

    def manager_cpu_s(self) -> float:
        """Time on a core so far."""
        found = Path(f"/proc/{self.manager.pid}/schedstat")
        tasks = Path(f"/proc/{self.manager.pid}/task").glob("*/schedstat") if found.exists() else ()
        return sum(int(one.read_text(encoding="ascii").split()[0]) for one in tasks) / 1e9

    async def play_straight(self, phase: Phase) -> list[TimedTurn]:
        num = self.work.num_conversations
        self._step += 1
        wish = {"phase": phase, "first": 10_000_000 + self._step * num, "count": num}
        said = await self.straight.request(wish)
        self.straight_cpu_s = said["cpu_s"]
        return [TimedTurn(*one) for one in said["turns"]]

    async def play_fleet(self, phase: Phase, step: int) -> list[TimedTurn]:
        self._environment.begin(phase)
        async with asyncio.timeout(_PATIENCE_S + 600.0):
            async for group in self.fleet.round(step):
                await self.fleet.take(group)
            await self.fleet.step_done(step)
            await self.fleet.settled()
        return self._environment.turns

    @property
    def num_turns_so_far(self) -> int:
        return len(self._environment.turns)


async def _measure(work: EpisodeWork, talk: Talk, folder: Path) -> dict[str, Any]:
    many = Phase(at_once=2 * work.slots, num_turns=work.num_turns, new=work.new)
    chats = msgspec.structs.replace(many, as_chat=True)
    single = Phase(at_once=1, num_turns=_SHORT_TURNS, new=_SHORT)
    async with Rig(work, talk, folder) as rig:
        await rig.play_straight(single)  # everything is compiled and warm after these
        await rig.play_fleet(single, 0)
        step = 1
        rates: list[tuple[float, float]] = []
        by_chat: list[ChatRun] = []
        waits: list[tuple[Figures, Figures]] = []
        again: list[float] = []
        manager_ms: list[float] = []
        cpu_shares: list[float] = []
        for _ in range(work.num_repeats):
            alone_cpu_s = rig.straight_cpu_s
            alone = read_off(await rig.play_straight(many))
            alone_cpu_s = rig.straight_cpu_s - alone_cpu_s
            before, cpu_s = await rig.worker.request({}), rig.manager_cpu_s()
            turns = await rig.play_fleet(many, step)
            through = read_off(turns)
            manager_ms.append((rig.manager_cpu_s() - cpu_s) / len(turns) * 1e3)
            after = await rig.worker.request({})
            again.append(_again(before, after, through))
            cpu_shares.append(alone_cpu_s / max(1e-9, after["cpu_s"] - before["cpu_s"]))
            rates.append((through.turns_per_s, alone.turns_per_s))
            waits.append((read_off(await rig.play_fleet(single, step + 1)), read_off(await rig.play_straight(single))))
            by_chat.append(await _by_chat(rig, chats, step + 2, alone))
            step += 3
        death = await _kill_one(rig, many, step)
        result = _result(work, talk, rates, waits, again, manager_ms, death)
        return {**result, **_cpu(cpu_shares), "chats": _of_chats(by_chat)}


class ChatRun(NamedTuple):
    turns_per_s: float
    share: float
    """Of the turns that were held straight at the engine shortly before."""
    again: float
    host_ms: float
    """CPU time of a turn in this process: harness, front, host and the trainer's side of the run."""


async def _by_chat(rig: Rig, phase: Phase, step: int, alone: Figures) -> ChatRun:
    before, cpu_s = await rig.worker.request({}), time.process_time()
    turns = await rig.play_fleet(phase, step)
    figures, cpu_s = read_off(turns), time.process_time() - cpu_s
    again = _again(before, await rig.worker.request({}), figures)
    return ChatRun(figures.turns_per_s, figures.turns_per_s / alone.turns_per_s, again, cpu_s / len(turns) * 1e3)


def _of_chats(runs: list[ChatRun]) -> dict[str, Any]:
    return {
        "turns_per_s": round(statistics.median(one.turns_per_s for one in runs), 2),
        "share": round(statistics.median(one.share for one in runs), 3),
        "shares_of_runs": [round(one.share, 3) for one in runs],
        "prefilled_again": round(statistics.median(one.again for one in runs), 4),
        "host_ms_a_turn": round(statistics.median(one.host_ms for one in runs), 2),
    }


def _cpu(shares: list[float]) -> dict[str, Any]:
    ordered = [round(one, 3) for one in shares]
    return {"share_of_cpu": round(statistics.median(shares), 3), "shares_of_cpu_of_runs": ordered}


def _again(before: dict[str, Any], after: dict[str, Any], seen: Figures) -> float:
    """Return the share of prompts' tokens that were computed although they had been computed before."""
    return max(0, after["prefilled"] - before["prefilled"] - seen.num_new) / seen.num_prompt


async def _kill_one(rig: Rig, phase: Phase, step: int) -> dict[str, Any]:
    """Kill the worker after a third of the turns; another one joins."""
    before = (await rig.fleet.status()).ledger
    counted = await rig.worker.request({})
    playing = asyncio.create_task(rig.play_fleet(phase, step))
    await asyncio.sleep(0)  # the turns of the phase before are gone
    while rig.num_turns_so_far < rig.work.num_conversations * phase.num_turns // 3 and not playing.done():
        await asyncio.sleep(0.01)
    of_first = await rig.worker.request({})
    rig.worker.process.kill()
    rig.worker = await rig.start_worker("w1")
    figures = read_off(await playing)
    after, of_second = (await rig.fleet.status()).ledger, await rig.worker.request({})
    prefilled = of_first["prefilled"] - counted["prefilled"] + of_second["prefilled"]
    return {
        "prompt_tokens": figures.num_prompt,
        "prefilled_tokens": prefilled,
        "prefilled_again": round(max(0, prefilled - figures.num_new) / figures.num_prompt, 4),
        "ledger_tokens_reprefilled": after["tokens_reprefilled"] - before["tokens_reprefilled"],
        "turns": rig.num_turns_so_far,
    }


def _result(
    work: EpisodeWork,
    talk: Talk,
    rates: list[tuple[float, float]],
    waits: list[tuple[Figures, Figures]],
    again: list[float],
    manager_ms: list[float],
    death: dict[str, Any],
) -> dict[str, Any]:
    middle = statistics.median

    def turn_ms(which: int) -> dict[str, float]:
        return {
            "p50": round(middle(one[which].p50_ms for one in waits), 2),
            "p99": round(middle(one[which].p99_ms for one in waits), 2),
        }

    return {
        "arch": work.arch or work.model,
        "slots": work.slots,
        "at_once": 2 * work.slots,
        "turns": work.num_turns,
        "new": work.new,
        "prompt": work.prompt,
        "longest": talk.longest,
        "turns_per_s": round(middle(through for through, _ in rates), 2),
        "turns_per_s_straight": round(middle(alone for _, alone in rates), 2),
        "share": round(middle(through / alone for through, alone in rates), 3),
        "shares_of_runs": [round(through / alone, 3) for through, alone in rates],
        "turn_ms": turn_ms(0),
        "turn_ms_straight": turn_ms(1),
        "turn_ms_added": round(middle(one.p50_ms - other.p50_ms for one, other in waits), 2),
        "manager_ms_a_turn": round(middle(manager_ms), 3),
        "prefilled_again": round(middle(again), 4),
        "death": death,
        "goals": GOALS,
        "machine": cpu(),
        "commit": commit(),
        "at": time.strftime("%Y-%m-%d"),
    }


def table(result: dict[str, Any]) -> list[str]:
    return [f"{key:<24}{value}" for key, value in result.items()]
