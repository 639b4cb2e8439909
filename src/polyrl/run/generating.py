"""An answer to a single prompt by the builtin engine in this process, for `polyrl generate`."""

import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from msgspec import structs

from polyrl.engines.builtin import models
from polyrl.engines.builtin.config import BuiltinConfig, choose_device, fit
from polyrl.engines.builtin.engine import BuiltinEngine
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.engine import EngineError, Job
from polyrl.engines.single import SingleSink
from polyrl.errors import UserError, one_line
from polyrl.ids import LeaseId, SampleId
from polyrl.manager.serving.texts import Reader
from polyrl.wire.frames import Sampling


class LoadedModel:
    """A model directory with its tokenizer, loaded for one prompt after the other."""

    def __init__(self, config: BuiltinConfig, given: Sequence[str]) -> None:
        """`given` names the settings that the user chose, which are not changed. Raises UserError."""
        began = time.monotonic()
        try:
            device = choose_device(config.device)
            self._loaded: Loaded = models.load(config.model, fit(config, device).dtype, device)
            self._tokenizer: Any = models.load_tokenizer(config.model)
        except EngineError as error:
            raise UserError(str(error)) from error
        if self._tokenizer is None:
            raise UserError(f"{config.model}: no tokenizer there; expected tokenizer.json beside the weights")
        self._config, self._given = config, given
        self.end_ids: frozenset[int] = frozenset()  # the tokenizer leaves special tokens out by itself
        self.load_s = time.monotonic() - began

    def decode(self, tokens: Sequence[int]) -> str:
        return self._tokenizer.decode(list(tokens), skip_special_tokens=True)

    def tokens(self, text: str, *, raw: bool) -> list[int]:
        """Return the tokens of a user message in the chat template; of the bare text if `raw`, or without one."""
        if raw or not self._tokenizer.chat_template:
            return self._tokenizer(text)["input_ids"]
        chat = [{"role": "user", "content": text}]
        try:
            written = self._tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        except Exception as error:  # a template is a program, and fails in its own ways
            raise UserError(
                f"{self._config.model}: its chat template cannot be used, {one_line(error)}; --raw goes on without it"
            ) from error
        return self._tokenizer(written, add_special_tokens=False)["input_ids"]

    def engine(self, num_tokens: int) -> BuiltinEngine:
        """Return an engine with a KV cache for one sample and no compilation, so that it is ready at once.

        Settings that the user chose are kept.
        """
        block = self._config.block_tokens
        num_blocks = -(-min(num_tokens, self._loaded.max_context) // block)
        fitting = {"slots": 1, "kv_tokens": num_blocks * block, "compile": False}
        changes = {key: value for key, value in fitting.items() if key not in self._given}
        return BuiltinEngine(structs.replace(self._config, **changes), self._loaded)


class Generated(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: str
    seconds: float
    first_token_s: float

    @property
    def tok_s(self) -> float:
        return len(self.tokens) / self.seconds


async def generate(
    model: LoadedModel, prompt: list[int], max_tokens: int, seed: int, sampling: Sampling, show: Callable[[str], object]
) -> Generated:
    """Generate one answer. `show` gets the text piece by piece, in whole characters. Raises UserError on failure."""
    engine, sink, reader = model.engine(len(prompt) + max_tokens), SingleSink(), Reader(model, ())
    tokens: list[int] = []
    logprobs: list[float] = []
    num_shown = 0
    first_at = None
    try:
        await engine.start(sink)
        began_at = time.monotonic()
        async for news in sink.generate(engine, Job(LeaseId(1), SampleId(1), prompt, [], max_tokens, seed, sampling)):
            first_at = time.monotonic() if first_at is None else first_at
            tokens += news.tokens
            logprobs += news.logprobs
            reader.read(news.tokens)
            if news.end is not None:
                reader.end()
                if news.end not in ("stop", "length"):
                    raise EngineError(news.detail)
                ended_at = time.monotonic()
                show(reader.text[num_shown:])
                return Generated(tokens, logprobs, reader.text, news.end, ended_at - began_at, first_at - began_at)
            show(reader.text[num_shown:])
            num_shown = len(reader.text)
        raise EngineError("the answer has no end")
    except EngineError as error:
        raise UserError(str(error)) from error
    finally:
        await engine.close()
