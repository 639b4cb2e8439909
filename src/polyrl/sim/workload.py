"""Lengths of answers: natural ones by domain, prompt, visit and index, drawn or read from a recording.

A visit is one time that a prompt is started; a deferred prompt has several in an epoch.

Rules it keeps: a length depends only on its key and the seed, never on the time or order of questions; it is at least 1
and at most `max_new_tokens`; samples of one prompt are correlated through a Gaussian copula, so that some prompts are
long in every attempt. With a recorded trace, prompt i is row i modulo the number of rows of its domain, and its
attempts cycle through the row's lengths. It leaves out what the tokens say, and what training does to lengths but
`growth_per_step`.
"""

from math import exp, log, log1p, sqrt
from pathlib import Path
from statistics import NormalDist
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from polyrl.errors import ConfigError
from polyrl.scheduling.rules.lengths import interpolate
from polyrl.sim.draws import normal
from polyrl.sim.scenario import SimDomainSection

_PROMPT_STREAM = 0x10
_SAMPLE_STREAM = 0x11
_LEAST = 1e-6
"""The least probability that is told from none."""
_LARGEST_EXPONENT = 600.0

_Tokens = Annotated[int, Meta(ge=1)]


class TraceRow(Struct, frozen=True, forbid_unknown_fields=True):
    """A recorded prompt and the lengths of its answers."""

    domain: str
    prompt_tokens: _Tokens
    lengths: Annotated[list[_Tokens], Meta(min_length=1)]


class Trace(Struct, frozen=True):
    """A recording: the rows of each domain, in the order of the file."""

    rows: dict[str, list[TraceRow]]


def read_trace(path: Path | str) -> Trace:
    """Read a JSONL file of rows. Raises ConfigError that names the file, the line and what is wrong."""
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    rows: dict[str, list[TraceRow]] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = msgspec.json.decode(line, type=TraceRow)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise ConfigError(f"{path}:{number}: {error}; expected {_EXPECTED_ROW}") from error
        rows.setdefault(row.domain, []).append(row)
    if not rows:
        raise ConfigError(f"{path}: has no rows; expected lines of {_EXPECTED_ROW}")
    return Trace(rows)


_EXPECTED_ROW = '{"domain": "math", "prompt_tokens": 512, "lengths": [700, 1200]}'


class _LengthCurve:
    """A domain's lengths by normal score: the logarithm is linear between the given points.

    Scores rather than probabilities, because a tail that is straight in them is the log-normal one that answers have.
    """

    def __init__(self, domain: SimDomainSection, max_new_tokens: int) -> None:
        uncapped = 1.0 - domain.cap_share
        points = [point for point in domain.length_quantiles if point[0] < uncapped]
        points.append((uncapped, _length_before_cap(domain, points, max_new_tokens)))
        self._points = [(_score(probability), log(tokens)) for probability, tokens in points]
        self.of_prompt = sqrt(domain.correlation)
        self.of_sample = sqrt(1.0 - domain.correlation)

    def tokens_at(self, score: float) -> float | None:
        """Return the tokens at that score; None for an answer that runs into the cap whatever the cap is."""
        return None if score >= self._points[-1][0] else exp(interpolate(self._points, score))


def _length_before_cap(domain: SimDomainSection, points: list[tuple[float, float]], max_new_tokens: int) -> float:
    """Return the longest answer that does not run into the cap whatever that is: how the tail goes on above
    `points`."""
    last = points[-1][1] if points else 1.0
    if domain.tail == "clipped" and points:
        return last
    if domain.tail == "log-normal" and len(points) >= 2:
        (low, less), (high, more) = ((_score(probability), log(tokens)) for probability, tokens in points[-2:])
        beyond = _score(1.0 - domain.cap_share) - high
        slope = (more - less) / (high - low) if high > low else 0.0
        return exp(min(_LARGEST_EXPONENT, more + beyond * slope))
    return max(last, float(max_new_tokens))


def _score(probability: float) -> float:
    return NormalDist().inv_cdf(min(1.0 - _LEAST, max(_LEAST, probability)))


class Workload:
    """The lengths of every answer that a run may ask for. Domains go by their index in the scenario."""

    def __init__(
        self,
        domains: list[SimDomainSection],
        max_new_tokens: int,
        seed: int,
        growth_per_step: float = 0.0,
        trace: Trace | None = None,
    ) -> None:
        self._domains = domains
        self._max_new_tokens = max_new_tokens
        self._seed = seed
        self._log_growth = log1p(growth_per_step)
        self._curves = [_LengthCurve(domain, max_new_tokens) for domain in domains]
        self._rows = None if trace is None else _rows_by_domain(trace, domains)

    def prompt_tokens(self, domain: int, prompt: int) -> int:
        if self._rows is None:
            return self._domains[domain].prompt_tokens
        rows = self._rows[domain]
        return rows[prompt % len(rows)].prompt_tokens

    def answer_tokens(self, domain: int, prompt: int, visit: int, index: int, step: int = 0) -> int:
        """Return where this sample ends unless it is stopped, the cap included."""
        if self._rows is not None:
            rows = self._rows[domain]
            lengths = rows[prompt % len(rows)].lengths
            return self._bounded(lengths[(visit + index) % len(lengths)], step)
        curve = self._curves[domain]
        z = curve.of_prompt * normal(self._seed, _PROMPT_STREAM, domain, prompt)
        z += curve.of_sample * normal(self._seed, _SAMPLE_STREAM, domain, prompt, visit, index)
        return self._bounded(curve.tokens_at(z), step)

    def _bounded(self, natural: float | None, step: int) -> int:
        if natural is None:
            return self._max_new_tokens
        # Bounded before it is taken: growth over thousands of steps is more than a float holds.
        growth = exp(min(step * self._log_growth, _LARGEST_EXPONENT))
        return max(1, round(min(float(self._max_new_tokens), natural * growth)))


def _rows_by_domain(trace: Trace, domains: list[SimDomainSection]) -> list[list[TraceRow]]:
    for domain in domains:
        if domain.name not in trace.rows:
            known = ", ".join(sorted(trace.rows))
            raise ConfigError(f"workload.trace: has no row of domain {domain.name!r}; its rows are of: {known}")
    return [trace.rows[domain.name] for domain in domains]
