"""One episode of an environment in the terminal, for `polyrl env try`: what is said, what is answered, what it pays.

Rules kept here: everything between the environment and the policy is what a run has: the front, the chats, the same
tokens. Only the policy is another: a model in this process, a person, or letters by chance.
"""

import asyncio
import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from polyrl.engines.engine import EngineError, Job
from polyrl.engines.single import SingleSink
from polyrl.errors import UserError
from polyrl.hosts.episode import CallLimits, DrawnAnswer, Episode, EpisodeEnd, EpisodeFailed, NoRoom
from polyrl.hosts.front import HostFront
from polyrl.hosts.known_families import find_family
from polyrl.hosts.own import HostParts
from polyrl.hosts.registry import find_environment
from polyrl.hosts.texts import ModelText, load_text
from polyrl.hosts.tools import before_stop
from polyrl.ids import LeaseId, SampleId
from polyrl.wire.frames import Sampling

if TYPE_CHECKING:
    from polyrl.run.generating import LoadedModel

Show = Callable[[str], object]

_PLAIN_CONTEXT = 32_768
_END = "<|im_end|>"
_TEMPLATE = (
    '{% if tools %}<|im_start|>system\nTools, called as <tool_call>{"name": ..., "arguments": ...}</tool_call>:\n'
    "{% for tool in tools %}{{ tool.function | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class TriedPolicy(Protocol):
    """A policy that is tried."""

    async def answer(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer: ...


class TriedEpisode(Episode):
    """An episode that shows what is said in it. `max_tokens` bounds the drawn tokens of all its calls."""

    def __init__(
        self,
        text: ModelText,
        policy: TriedPolicy,
        show: Show,
        *,
        index: int,
        seed: int,
        max_context: int,
        max_tokens: int,
    ) -> None:
        super().__init__("try", index=index, seed=seed, max_context=max_context)
        self._text, self._policy, self._show = text, policy, show
        self._known: list[int] = []
        self._num_left = max_tokens

    async def draw(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        if self._num_left < 1:
            raise NoRoom("the episode's tokens are spent; --tokens gives it more")
        goes_on = list(prompt[: len(self._known)]) == self._known
        self._show("" if goes_on else "--- a prompt that does not go on from the last answer\n")
        self._show(self._text.decode(prompt[len(self._known) :] if goes_on else prompt, special=True))
        most = self._num_left if limits.max_tokens is None else min(self._num_left, limits.max_tokens)
        drawn = await self._policy.answer(prompt, limits._replace(max_tokens=most))
        self._num_left -= len(drawn.tokens)
        self._show(f">>> {self._text.decode(drawn.tokens, special=True)}\n")
        self._known = [*prompt, *drawn.tokens]
        return drawn


class Typist:
    """A person at the keyboard. `read` returns one line, or None at the end of the input."""

    def __init__(self, text: ModelText, read: Callable[[], str | None]) -> None:
        self._text, self._read = text, read

    async def answer(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        line = await asyncio.to_thread(self._read)
        if line is None:
            raise EpisodeFailed("the input ended before the episode")
        return _as_drawn(self._text, line, limits)


class RandomLetters:
    """A few letters and digits by chance: enough to see that an environment bears nonsense."""

    def __init__(self, text: ModelText, seed: int) -> None:
        self._text, self._draws = text, random.Random(seed)

    async def answer(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        letters = "abcdefghijklmnopqrstuvwxyz0123456789"
        return _as_drawn(self._text, "".join(self._draws.choices(letters, k=self._draws.randint(1, 6))), limits)


def _as_drawn(text: ModelText, said: str, limits: CallLimits) -> DrawnAnswer:
    tokens = [*text.encode(before_stop(said, limits.stop)), *sorted(text.end_ids)[:1]]
    most = len(tokens) if limits.max_tokens is None else limits.max_tokens
    finish = "stop" if len(tokens) <= most else "length"
    return DrawnAnswer(tokens[:most], [0.0] * len(tokens[:most]), finish)


class ModelPolicy:
    """A model directory, with the builtin engine in this process."""

    def __init__(self, engine: Any, sink: SingleSink, text: ModelText, seed: int, sampling: Sampling) -> None:
        self._engine, self._sink, self._text = engine, sink, text
        self._seed, self._sampling = seed, sampling
        self._num_calls = 0

    async def answer(self, prompt: Sequence[int], limits: CallLimits) -> DrawnAnswer:
        self._num_calls += 1
        tokens: list[int] = []
        logprobs: list[float] = []
        sampling = Sampling(temperature=self._sampling.temperature, stop_ids=limits.stop_ids, stop=limits.stop)
        number, most = LeaseId(self._num_calls), limits.max_tokens or 1
        job = Job(number, SampleId(1), list(prompt), [], most, self._seed + self._num_calls, sampling)
        try:
            async for news in self._sink.generate(self._engine, job):
                tokens += news.tokens
                logprobs += news.logprobs
                if news.end is not None:
                    if news.end not in ("stop", "length"):
                        raise EpisodeFailed(f"the model cannot answer: {news.detail}")
                    return DrawnAnswer(tokens, logprobs, "stop" if news.end == "stop" else "length")
        except EngineError as error:
            raise EpisodeFailed(f"the model cannot answer: {error}") from error
        raise EpisodeFailed("the answer has no end")


class Trial(NamedTuple):
    """The environment, or the domain, that is tried."""

    environment: str
    args: Mapping[str, Any]
    task_index: int = 0
    seed: int = 0
    max_tokens: int = 2048
    max_turns: int | None = None
    temperature: float = 1.0


def plain_text() -> ModelText:
    """Return bytes as tokens, with a simple chat template, for a policy that is no model. Raises UserError."""
    try:
        from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

        from polyrl.data.chat_template import ChatTemplate
    except ImportError as error:
        raise UserError(f"text needs {error.name}: pip install 'polyrl[serve]'") from error
    letters = {letter: number for number, letter in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    tokenizer = Tokenizer(models.BPE(letters, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in ("<|im_start|>", _END)])
    ends = frozenset({len(letters) + 1})
    return ModelText(tokenizer, template=ChatTemplate(_TEMPLATE, {}), end_ids=ends, max_context=_PLAIN_CONTEXT)


async def try_without_model(trial: Trial, read: Callable[[], str | None] | None, show: Show) -> EpisodeEnd:
    """Play with a person who types, or, without `read`, with letters by chance. Raises UserError, EpisodeFailed."""
    text = plain_text()
    policy = RandomLetters(text, trial.seed) if read is None else Typist(text, read)
    return await _play(trial, text, policy, show, _PLAIN_CONTEXT)


async def try_model(trial: Trial, model: "LoadedModel", folder: str, show: Show) -> EpisodeEnd:
    """Play with a model. Raises UserError, EpisodeFailed."""
    text = load_text(folder)
    context = text.max_context or _PLAIN_CONTEXT
    engine, sink = model.engine(context), SingleSink()
    try:
        await engine.start(sink)
        policy = ModelPolicy(engine, sink, text, trial.seed, Sampling(temperature=trial.temperature))
        return await _play(trial, text, policy, show, context, folder)
    except EngineError as error:
        raise UserError(str(error)) from error
    finally:
        await engine.close()


async def _play(
    trial: Trial, text: ModelText, policy: TriedPolicy, show: Show, max_context: int, folder: str = ""
) -> EpisodeEnd:
    async with AsyncExitStack() as stack:
        stack.callback(text.close)
        family = find_family(folder, text) if folder else None
        front = HostFront(
            max_context=max_context, text=text, family=family, sampling=Sampling(temperature=trial.temperature)
        )
        await front.start()
        stack.push_async_callback(front.close)
        parts = HostParts(front, text, family, folder)
        environment = find_environment(trial.environment, trial.args, parts, max_turns=trial.max_turns)
        stack.push_async_callback(environment.close)
        await environment.start()
        episode = TriedEpisode(
            text,
            policy,
            show,
            index=trial.task_index,
            seed=trial.seed,
            max_context=max_context,
            max_tokens=trial.max_tokens,
        )
        return await environment.play(episode)
