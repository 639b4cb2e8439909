"""Environments of a person's own: a class of twenty lines, played by a host.

    class Calculator:
        max_turns = 2                                          # default 16
        def begin(self, task, seed): return "12 + 7 = ?"       # messages, or a text
        def step(self, text): return Turn("19", done=True, reward=1.0)

`task` is a row of the recipe's data, if there is data, with the task's number as `index`. Episodes of a group have the
same task and seed. An object plays one episode. Optional: `close()`; `out_of_turns() -> float`, the reward of an
episode that is out of turns, tokens or context (default 0.0); attributes `tools`, `stop`, `max_tokens`, `num_tasks`,
`max_at_once`.
A class that brings a harness of its own has `play(base_url, task, seed)` in place of `begin` and `step`, and returns
the reward, or a Turn with it. Each method may be async; plain ones run in a thread.

Rules kept here: raising is a failure, and so is the end without a reward, NaN, and messages of a wrong shape: one
line, no reward, never a zero. Rewards of several steps are summed. An end that the policy may have caused is scored.
"""

import asyncio
import inspect
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from polyrl.errors import UserError, one_line
from polyrl.hosts.bodies import FrontRefusal, checked_messages
from polyrl.hosts.episode import (
    MAX_WHY,
    CallLimits,
    Episode,
    EpisodeEnd,
    EpisodeFailed,
    NoRoom,
    checked_parts,
    finite,
)
from polyrl.hosts.front import HostFront
from polyrl.hosts.known_families import KnownFamily
from polyrl.hosts.texts import ModelText
from polyrl.hosts.threads import EpisodeThread
from polyrl.hosts.transcript import Transcript

log = logging.getLogger(__name__)

MAX_TURNS = 16
_CLOSE_S = 10.0
_MAX_RUNAWAYS = 3
"""From so many calls on that never return and compute on, each turn of the others takes a third of a second longer."""
_SOLVED = 1.0
"""The least reward of an episode that counts as correct, unless its environment says so itself."""


class Turn(NamedTuple):
    """An environment's reply to an answer."""

    messages: Sequence[dict[str, Any]] | str = ""
    """For the policy: messages, or the text of a user's message. Not needed at the end."""
    done: bool = False
    reward: float | None = None
    correct: bool | None = None
    """None: a reward of at least 1 is correct."""
    parts: Mapping[str, float] = {}
    why: str = ""


class HostParts(NamedTuple):
    """The parts of a host that its environments use."""

    front: HostFront
    text: ModelText | None = None
    family: KnownFamily | None = None
    folder: str = ""
    """The model's directory, if there is one."""
    chat_options: Mapping[str, Any] = {}
    """Arguments of the chat template, for example `enable_thinking`."""


class OwnEnvironment:
    """Plays a class of a person's own."""

    def __init__(
        self,
        make: Callable[[], Any],
        parts: HostParts,
        *,
        name: str = "",
        max_turns: int | None = None,
        runaway_s: float = 5.0,
    ) -> None:
        """A call that computes for `runaway_s` after its episode has ended never returns."""
        self._make = make
        self._parts = parts
        self._max_turns = max_turns
        self._runaway_s = runaway_s
        self.name = name or getattr(make, "__name__", "") or type(make).__name__
        self.num_tasks: int | None = None
        self.max_at_once: int | None = None
        self._left: list[EpisodeThread] = []
        """Threads of episodes that have ended, while a call had not."""

    @property
    def worn_out(self) -> str:
        runaways = [one for one in list(self._left) if one.has_run_away(self._runaway_s)]
        if len(runaways) < _MAX_RUNAWAYS:
            return ""
        return f"environment {self.name}: {len(runaways)} calls never return, the last one at {runaways[-1].place()}"

    async def start(self) -> None:
        """Make one object, so that wrong settings are told before anything is played."""
        thread = EpisodeThread(f"{self.name}-start")
        try:
            one = await thread.run(self._make)
            self.num_tasks = _whole_number(one, "num_tasks")
            self.max_at_once = _whole_number(one, "max_at_once")
            _whole_number(one, "max_tokens")
            _check_methods(one, self.name)
            if not hasattr(one, "play"):
                self._text()
            await _close(one, thread)
        except UserError:
            raise
        except Exception as error:
            raise UserError(f"environment {self.name}: {one_line(error)}") from error
        finally:
            thread.end()

    async def close(self) -> None:
        pass

    async def play(self, episode: Episode) -> EpisodeEnd:
        """Raises EpisodeFailed."""
        thread = EpisodeThread(episode.name)
        one: Any = None
        try:
            one = await thread.run(self._make)
            if hasattr(one, "play"):
                return await self._play_harness(one, episode, thread)
            return await self._play_turns(one, episode, thread)
        except EpisodeFailed:
            raise
        except Exception as error:
            raise EpisodeFailed(f"environment {self.name}: {one_line(error)}") from error
        finally:
            await self._leave(one, thread)

    async def _leave(self, one: Any, thread: EpisodeThread) -> None:
        """Close an environment. An environment that cannot be closed in time is left behind: its episode has ended."""
        try:
            async with asyncio.timeout(_CLOSE_S):
                await _close(one, thread)
        except Exception as error:  # noqa: BLE001  the episode's reward stands, whatever happens afterwards
            log.warning("environment %s: close: %s", self.name, one_line(error))
        finally:
            thread.end()
            self._left = [one for one in (*self._left, thread) if one.is_busy]

    async def _play_turns(self, one: Any, episode: Episode, thread: EpisodeThread) -> EpisodeEnd:
        parts, tools = self._parts, getattr(one, "tools", None) or ()
        transcript = Transcript(self._text(), family=parts.family, tools=tools, chat_options=parts.chat_options)
        limits = _limits_of(one)
        max_turns = self._max_turns or int(getattr(one, "max_turns", MAX_TURNS))
        transcript.say(_messages(await _run(one.begin, thread, _task_of(episode), episode.seed), "begin"))
        reward, num_turns, why = 0.0, 0, f"out of {max_turns} turns"
        while num_turns < max_turns:
            try:
                drawn = await episode.call(await transcript.prompt(), limits)
            except NoRoom as error:
                if num_turns == 0:
                    raise EpisodeFailed(f"its first prompt has no room: {error}") from error
                why = str(error)
                break
            num_turns += 1
            turn = _checked(await _run(one.step, thread, transcript.hear(drawn, limits)))
            reward += 0.0 if turn.reward is None else turn.reward
            if turn.done:
                return _end(turn, reward, num_turns)
            said = _messages(turn.messages, "step")
            if not said:
                raise EpisodeFailed("step said neither done nor anything to the policy; expected one of them")
            transcript.say(said)
        out_of_turns = getattr(one, "out_of_turns", None)
        last = 0.0 if out_of_turns is None else finite(await _run(out_of_turns, thread), "out_of_turns()")
        return _end(Turn(done=True, reward=last, why=why), reward + last, num_turns)

    async def _play_harness(self, one: Any, episode: Episode, thread: EpisodeThread) -> EpisodeEnd:
        with self._parts.front.open(episode) as opened:
            said = await _run(one.play, thread, opened.base_url, _task_of(episode), episode.seed)
            opened.check()
            turn = said if isinstance(said, Turn) else Turn(reward=finite(said, "the reward"))
            turn = _checked(turn._replace(done=True))
            return _end(turn, 0.0 if turn.reward is None else turn.reward, opened.num_calls)

    def _text(self) -> ModelText:
        if self._parts.text is None:
            raise UserError(
                f"environment {self.name}: needs text, and the host has no model with a tokenizer; expected --model DIR"
            )
        return self._parts.text


def _end(turn: Turn, reward: float, num_turns: int) -> EpisodeEnd:
    correct = finite(reward, "the reward") >= _SOLVED if turn.correct is None else bool(turn.correct)
    why = " ".join(str(turn.why).split())[:MAX_WHY]
    return EpisodeEnd(reward=reward, correct=correct, parts=checked_parts(turn.parts), why=why, num_turns=num_turns)


def _checked(turn: object) -> Turn:
    if not isinstance(turn, Turn):
        raise EpisodeFailed(f"step returned {type(turn).__name__}; expected Turn(messages, done, reward)")
    if turn.reward is not None:
        turn = turn._replace(reward=finite(turn.reward, "the reward"))
    if turn.done and turn.reward is None:
        raise EpisodeFailed("step said done without a reward; expected Turn(..., done=True, reward=a number)")
    return turn


def _messages(said: object, where: str) -> list[dict[str, Any]]:
    if isinstance(said, str):
        return [{"role": "user", "content": said}] if said else []
    if not isinstance(said, list | tuple):
        raise EpisodeFailed(f"{where} returned {type(said).__name__}; expected a text or a list of messages")
    try:
        found = checked_messages(list(said), where)
    except FrontRefusal as error:
        raise EpisodeFailed(str(error)) from error
    return [{**message, "content": message["content"] or ""} for message in found]


def _task_of(episode: Episode) -> dict[str, Any]:
    return {"index": episode.index, **(episode.task or {})}


def _limits_of(one: Any) -> CallLimits:
    stop = getattr(one, "stop", None) or ()
    return CallLimits(getattr(one, "max_tokens", None), (), (stop,) if isinstance(stop, str) else tuple(stop))


def _whole_number(one: Any, name: str) -> int | None:
    num = getattr(one, name, None)
    if num is None or (isinstance(num, int) and num >= 1):
        return num
    raise UserError(f"{name}: got {num!r}, expected a whole number from 1 on, or None")


def _check_methods(one: Any, name: str) -> None:
    wanted = ("play",) if hasattr(one, "play") else ("begin", "step")
    for method in wanted:
        if not callable(getattr(one, method, None)):
            raise UserError(f"environment {name}: has no method {method}; expected begin and step, or play")


async def _run(method: Callable[..., Any], thread: EpisodeThread, *args: object) -> Any:
    if inspect.iscoroutinefunction(method):
        return await method(*args)
    return await thread.run(lambda: method(*args))


async def _close(one: Any, thread: EpisodeThread) -> None:
    close = getattr(one, "close", None)
    if callable(close):
        await _run(close, thread)
