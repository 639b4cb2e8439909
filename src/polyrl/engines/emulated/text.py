"""The emulated engine's text: lengths, tokens and log-probabilities that are functions of seed and position.

So a sample that moves to another worker goes on with the same tokens, and a test can say beforehand what will come.
"""

from hashlib import blake2b
from math import exp, log, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Annotated, Any, NamedTuple

import numpy as np
from msgspec import Meta, Struct

from polyrl.engines.engine import EngineEnd, Job
from polyrl.errors import ConfigError
from polyrl.scheduling.core.bounds import AtLeastOne, Count, NotNegative, Positive, Share
from polyrl.scheduling.rules.order import mix64
from polyrl.wire.columns import pack_tokens

EOS = 2
_FIRST_TOKEN = 3
"""Smaller ids are special, and are never drawn."""
LARGEST_TOKEN = 2**31 - 1
_LEAST_LOGPROB = -8.0

TOKEN_STREAM, _PROMPT_STREAM, _SAMPLE_STREAM, _TRACE_STREAM = 0x20, 0x21, 0x22, 0x23


class EmulatedConfig(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings of the engine (docs/concepts/engines.md). Seconds and speeds are those of the emulated machine."""

    slots: AtLeastOne = 64
    tokens_per_s: Positive = 50.0
    """The pace of a sample that runs alone."""
    step_per_sample_s: NotNegative = 0.0001
    """Seconds that each further running sample adds to a decode step."""
    step_per_context_token_s: NotNegative = 0.0
    """Seconds that each token of context in the cache adds to a decode step."""
    prefill_tokens_per_s: Positive = 20_000.0
    kv_tokens: Count = 0
    """Tokens that fit into the cache; 0: any number."""
    median_tokens: Annotated[float, Meta(ge=1, le=1e9)] = 660.0
    sigma: Annotated[float, Meta(ge=0, le=10)] = 1.0
    """Spread of the logarithm of lengths. 1.0: one answer in ten is 3.6 times the median or longer."""
    correlation: Share = 0.5
    """Correlation of the log-lengths of two answers to one prompt."""
    trace: str = ""
    """A file of lengths to pick from instead, a whole number a line."""
    vocab: Annotated[int, Meta(gt=_FIRST_TOKEN, le=LARGEST_TOKEN + 1)] = 32_000
    version: Count | None = None
    """The version installed from the start; none: nothing."""
    start_s: NotNegative = 0.0
    install_s: NotNegative = 0.0
    speedup: Positive = 1.0
    """10: everything takes a tenth of its time."""
    tally: str = ""
    """A file in which it counts the tokens it has made: tokens that a killed worker never sent are known only here."""
    fail_every: Count = 0
    """One job in this many ends in `engine_failed` halfway; 0: none."""


class EmulatedEnd(NamedTuple):
    num_tokens: int
    """All tokens of the sample."""
    reason: EngineEnd
    has_eos: bool
    """Its last token is the end of text."""


def ending_of(job: Job, config: EmulatedConfig, recorded: list[int]) -> EmulatedEnd:
    """Return where the job ends if it is not stopped."""
    drawn = answer_tokens(job, config, recorded)
    ending = EmulatedEnd(drawn, "stop", True)
    if job.sampling.ignore_eos or drawn > job.max_tokens:
        ending = EmulatedEnd(job.max_tokens, "length", False)
    done = len(job.so_far)
    if ending.num_tokens <= done:  # its end was made already, and not heard of
        return EmulatedEnd(done, ending.reason, False)
    if job.sampling.stop_ids:
        tokens, _ = draw([mix64(job.seed, TOKEN_STREAM)], [done], [ending.num_tokens - done], config.vocab)
        stops = np.flatnonzero(np.isin(tokens, job.sampling.stop_ids))
        if stops.size and not (ending.has_eos and stops[0] == len(tokens) - 1):
            return EmulatedEnd(done + int(stops[0]) + 1, "stop", False)
    return ending


def answer_tokens(job: Job, config: EmulatedConfig, recorded: list[int]) -> int:
    """Return the answer's length: drawn, or picked from the recorded lengths if there are any."""
    if recorded:
        return recorded[mix64(job.seed, _TRACE_STREAM) % len(recorded)]
    prompt_key = int.from_bytes(blake2b(pack_tokens(job.prompt), digest_size=8).digest(), "little")
    z = sqrt(config.correlation) * _normal(prompt_key, _PROMPT_STREAM)
    z += sqrt(1.0 - config.correlation) * _normal(job.seed, _SAMPLE_STREAM)
    return max(1, round(exp(log(config.median_tokens) + config.sigma * z)))


def _normal(*key: int) -> float:
    # 52 bits and a half are exact in a double, and never 0 or 1.
    return NormalDist().inv_cdf(((mix64(*key) >> 12) + 0.5) * 2.0**-52)


def draw(keys: list[int], starts: list[int], counts: list[int], vocab: int) -> tuple[Any, Any]:
    """Draw tokens and log-probabilities of many samples in a row: `counts` of each, from position `starts` on."""
    num = np.asarray(counts)
    offsets = np.asarray(starts) - np.cumsum(num) + num
    positions = (np.arange(num.sum()) + np.repeat(offsets, num)).astype(np.uint64)
    bits = _splitmix64(np.repeat(np.asarray(keys, np.uint64), num), positions)
    high, low = bits >> np.uint64(32), bits & np.uint64(0xFFFFFF)
    tokens = (high * np.uint64(vocab - _FIRST_TOKEN) >> np.uint64(32)) + np.uint64(_FIRST_TOKEN)
    # To the fourth power most are near 0, as a trained model's. 24 bits are exact in the float32 of the wire.
    share = low.astype(np.float32) * np.float32(2.0**-24)
    return tokens.astype(np.int64), np.float32(_LEAST_LOGPROB) * np.square(np.square(share))


def _splitmix64(key: Any, position: Any) -> Any:
    bits = key + (position + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
    bits = (bits ^ (bits >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    bits = (bits ^ (bits >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return bits ^ (bits >> np.uint64(31))


def read_lengths(path: str) -> list[int]:
    """Return the lengths of a trace, a whole number a line. Raises ConfigError with the file and the line."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"trace: {path}: cannot be read: {error}") from error
    lengths: list[int] = []
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if not (text.isascii() and text.isdecimal() and len(text) < 10 and int(text) > 0):
            raise ConfigError(f"trace: {path}:{number}: got {text[:40]!r}, expected a number of tokens, such as 700")
        lengths.append(int(text))
    if not lengths:
        raise ConfigError(f"trace: {path}: has no lengths, expected a number of tokens a line")
    return lengths
