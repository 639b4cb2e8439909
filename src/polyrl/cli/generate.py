"""`polyrl generate`: try a model directory on one prompt, with the builtin engine in this process."""

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from polyrl.engines import registry
from polyrl.errors import UserError, one_line, shorten

if TYPE_CHECKING:
    from polyrl.engines.builtin.config import BuiltinConfig
    from polyrl.engines.builtin.models import Loaded
    from polyrl.engines.engine import Engine, EngineEnd, Job
    from polyrl.ids import LeaseId, Version

EXAMPLE = """\
examples:
  polyrl generate --model DIR --prompt "What is 7 plus 5?"
  polyrl generate --model DIR --prompt "Once upon a time" --raw --temperature 0.8 --seed 3 --tokens 500
  polyrl generate --model DIR --prompt "What is 7 plus 5?" --json device=cuda dtype=bfloat16

Settings of the engine are key=value (docs/concepts/builtin-engine.md)."""

_HEALTH_INTERVAL_S = 1.0
_HALF_A_LETTER = "\ufffd"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("settings", nargs="*", metavar="key=value", help="settings of the engine")
    parser.add_argument("--model", metavar="DIR", help="a Hugging Face directory")
    parser.add_argument("--prompt", required=True, metavar="TEXT")
    parser.add_argument("--tokens", type=int, default=256, metavar="N", help="at most so many (default: %(default)s)")
    parser.add_argument(
        "--temperature", type=float, default=0.0, metavar="T", help="0 takes the likeliest (default: %(default)g)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, metavar="N", help="same seed, same answer (default: %(default)s)"
    )
    parser.add_argument("--raw", action="store_true", help="go on from the prompt as it is, without a chat template")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of live text")


def run(args: argparse.Namespace) -> int:
    from polyrl.config import apply_overrides
    from polyrl.run.event_loop import run_loop

    if args.tokens < 1:
        raise UserError(f"--tokens: {args.tokens}; expected at least 1")
    if not 0 <= args.temperature <= 100:
        raise UserError(f"--temperature: {args.temperature:g}; expected a number from 0 to 100")
    text = _text(args.prompt)
    registry.check_libraries()
    given = apply_overrides({}, args.settings, example="slots=16")
    config = registry.builtin_config(given, args.model)
    began_at = time.monotonic()
    loaded, tokenizer = _load(config)
    prompt = _encode(config.model, tokenizer, text, raw=args.raw)
    loaded_s = time.monotonic() - began_at
    config = _fitted(config, given, loaded, len(prompt) + args.tokens)
    answer = run_loop(_answer(args, config, loaded, tokenizer, prompt))
    if args.json:
        print(json.dumps(_as_json(args, config, answer, len(prompt), loaded_s)))
    else:
        print(f"{answer}; loaded in {loaded_s:.1f} s", file=sys.stderr)
    return 0


def _load(config: "BuiltinConfig") -> "tuple[Loaded, Any]":
    from polyrl.engines.builtin import models
    from polyrl.engines.builtin.config import choose_device, fit
    from polyrl.engines.engine import EngineError

    try:
        device = choose_device(config.device)
        loaded = models.load(config.model, fit(config, device).dtype, device)
        tokenizer = models.load_tokenizer(config.model)
    except EngineError as error:
        raise UserError(str(error)) from error
    if tokenizer is None:
        raise UserError(f"{config.model}: no tokenizer there; expected tokenizer.json beside the weights")
    return loaded, tokenizer


def _text(given: str) -> str:
    """Bytes that the locale has no letters for are in an argument as surrogates. They are UTF-8 all the same."""
    try:
        return given.encode(errors="surrogateescape").decode()
    except UnicodeError as error:
        raise UserError(f"--prompt: {shorten(repr(given))} is not UTF-8; expected text") from error


def _encode(folder: str, tokenizer: Any, text: str, *, raw: bool) -> list[int]:
    if raw or not tokenizer.chat_template:
        return tokenizer(text)["input_ids"]
    chat = [{"role": "user", "content": text}]
    try:
        written = tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
    except Exception as error:  # a template is a program, and fails in its own ways
        raise UserError(
            f"{folder}: its chat template cannot be used, {one_line(error)}; --raw goes on without it"
        ) from error
    return tokenizer(written, add_special_tokens=False)["input_ids"]


def _fitted(config: "BuiltinConfig", given: dict[str, Any], loaded: "Loaded", num_tokens: int) -> "BuiltinConfig":
    """A cache for this one sample, and an engine that is ready at once, unless others were asked for."""
    from msgspec import structs

    num_blocks = -(-min(num_tokens, loaded.max_context) // config.block_tokens)
    fitting = {"slots": 1, "kv_tokens": num_blocks * config.block_tokens, "compile": False}
    return structs.replace(config, **{key: value for key, value in fitting.items() if key not in given})


class _Answer(NamedTuple):
    tokens: list[int]
    logprobs: list[float]
    text: str
    finish: str
    seconds: float
    first_token_s: float

    @property
    def tok_s(self) -> float:
        return len(self.tokens) / self.seconds

    def __str__(self) -> str:
        cut_off = ", cut off" if self.finish == "length" else ""
        return f"{len(self.tokens)} tokens in {self.seconds:.2f} s, {self.tok_s:.1f} tok/s{cut_off}"


async def _answer(
    args: argparse.Namespace, config: "BuiltinConfig", loaded: "Loaded", tokenizer: Any, prompt: list[int]
) -> _Answer:
    from polyrl.engines.builtin.engine import BuiltinEngine
    from polyrl.engines.engine import EngineError, Job
    from polyrl.ids import LeaseId, SampleId
    from polyrl.wire.frames import Sampling

    engine = BuiltinEngine(config, loaded)
    sampling = Sampling(temperature=args.temperature)
    try:
        return await _watch(
            engine,
            Job(LeaseId(1), SampleId(1), prompt, [], args.tokens, args.seed, sampling),
            _Text(tokenizer),
            live=not args.json,
        )
    except EngineError as error:
        raise UserError(str(error)) from error
    finally:
        await engine.close()


async def _watch(engine: "Engine", job: "Job", text: "_Text", *, live: bool) -> _Answer:
    """Print tokens as they come, until the answer ends."""
    from polyrl.engines.engine import EngineError

    news = _News()
    await engine.start(news)
    began_at = time.monotonic()
    first_at = None
    logprobs: list[float] = []
    engine.generate(job)
    while (heard := await news.next(engine)).finish is None:
        first_at = time.monotonic() if first_at is None else first_at
        logprobs += heard.logprobs
        _show(text.add(heard.tokens), live=live)
    if heard.finish not in ("stop", "length"):
        raise EngineError(heard.detail)
    ended_at = time.monotonic()
    _show(text.end() + "\n", live=live)
    first_token_s = (ended_at if first_at is None else first_at) - began_at
    return _Answer(text.tokens, logprobs, text.shown, heard.finish, ended_at - began_at, first_token_s)


def _show(text: str, *, live: bool) -> None:
    if live:
        print(text, end="", flush=True)


class _Heard(NamedTuple):
    tokens: Sequence[int] = ()
    logprobs: Sequence[float] = ()
    finish: "EngineEnd | None" = None
    detail: str = ""


class _News:
    """The engine's sink: a queue, so that a terminal which is slow or gone is none of the engine's business."""

    def __init__(self) -> None:
        self._heard: asyncio.Queue[_Heard] = asyncio.Queue()

    def tokens(self, lease: "LeaseId", tokens: Sequence[int], logprobs: Sequence[float], version: "Version") -> None:
        self._heard.put_nowait(_Heard(tokens, logprobs))

    def ended(self, lease: "LeaseId", reason: "EngineEnd", detail: str = "") -> None:
        self._heard.put_nowait(_Heard(finish=reason, detail=detail))

    async def next(self, engine: "Engine") -> _Heard:
        """Raises EngineError when the engine cannot go on."""
        from polyrl.engines.engine import EngineError

        while True:
            try:
                async with asyncio.timeout(_HEALTH_INTERVAL_S):
                    return await self._heard.get()
            except TimeoutError:
                trouble = engine.health()
                if trouble is not None:
                    raise EngineError(trouble) from None


class _Text:
    """From tokens to text, piece by piece. A letter may take several tokens: it is held back until it is whole.

    A token is decoded together with those before it, since some tokenizers drop a space at the beginning of a text.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.tokens: list[int] = []
        self.shown = ""
        self._from, self._to = 0, 0
        """The last piece that was shown."""

    def add(self, tokens: Sequence[int]) -> str:
        """What can be shown now."""
        self.tokens += tokens
        return self._take(whole=False)

    def end(self) -> str:
        """What was held back."""
        return self._take(whole=True)

    def _take(self, *, whole: bool) -> str:
        before = self._decode(self.tokens[self._from : self._to])
        now = self._decode(self.tokens[self._from :])
        if not whole and now.endswith(_HALF_A_LETTER):
            return ""
        self._from, self._to = self._to, len(self.tokens)
        self.shown += now[len(before) :]
        return now[len(before) :]

    def _decode(self, tokens: list[int]) -> str:
        return self._tokenizer.decode(tokens, skip_special_tokens=True)


def _as_json(
    args: argparse.Namespace, config: "BuiltinConfig", answer: _Answer, num_prompt: int, loaded_s: float
) -> dict[str, Any]:
    return {
        "model": config.model,
        "text": answer.text,
        "finish": answer.finish,
        "tokens": len(answer.tokens),
        "prompt_tokens": num_prompt,
        "seconds": round(answer.seconds, 4),
        "tok_s": round(answer.tok_s, 2),
        "first_token_s": round(answer.first_token_s, 4),
        "load_s": round(loaded_s, 3),
        "temperature": args.temperature,
        "seed": args.seed,
        "token_ids": answer.tokens,
        "logprobs": answer.logprobs,
    }
