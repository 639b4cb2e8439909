"""Alarms: what in a run's metrics, answers and fleet a person should look at, as pure functions of what was measured.

Rules kept here: an alarm says what was seen, against what it is held, and what to do. One bad step raises none, but for
gradients. Nothing here stops a run.
"""

from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from polyrl.wire.control import Status, WorkerStatus

Series = Mapping[str, Sequence[float]]
"""Metrics by name, the values that were told, in order."""

_FEW = 5
"""Steps whose mean is compared: fewer are noise."""
_COLLAPSED = 0.5
_ENTROPY_LEFT = 0.05
_SOLVED = 0.95
_SPIKE = 10.0
_MISMATCH_NATS = 0.05
_DRIFT = 3.0
_STALE_VERSIONS = 4.0
_LAGS = 0.5
_SILENT_S = 10.0
_REPEATING = 0.2
"""Share of a step's answers."""
_TAIL_TOKENS = 256
_MIN_TOKENS = 64
_NOT_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Alarm(NamedTuple):
    name: str
    what: str
    do: str


def of_metrics(series: Series) -> Iterator[Alarm]:
    """Yield the alarms of a run's metrics."""
    yield from _reward(series.get("reward/mean", ()))
    if fmean(series.get("reward/mean", ())[-_FEW:] or (0.0,)) < _SOLVED:  # where all is solved, answers may agree
        yield from _entropy(series.get("actor/entropy", ()))
    yield from _gradient(series.get("actor/grad_norm", ()))
    yield from _mismatch(series.get("actor/mismatch_kl", ()))
    yield from _lengths(series.get("token/response_length/mean", ()))
    stale = series.get("staleness/mean", ())[-_FEW:]
    if stale and fmean(stale) > _STALE_VERSIONS:
        what = f"tokens trained on are {fmean(stale):.1f} versions old, mean of the last {len(stale)} steps"
        yield Alarm("stale data", what, "lower train.max_staleness, or add workers so that answers end sooner")


def _reward(values: Sequence[float]) -> Iterator[Alarm]:
    if len(values) < 2 * _FEW:
        return
    means = [fmean(values[place : place + _FEW]) for place in range(len(values) - _FEW + 1)]
    best, now, low = max(means), means[-1], min(means[0], *values)
    if best - now > _COLLAPSED * (best - low) and best - now > 0.05 * max(1.0, abs(best)):
        what = f"mean reward fell from {best:.3g} to {now:.3g}, means of {_FEW} steps"
        yield Alarm(
            "reward collapsed", what, "read the newest answers; go back to a checkpoint with a lower learning rate"
        )


def _entropy(values: Sequence[float]) -> Iterator[Alarm]:
    if len(values) < 2 * _FEW:
        return
    first, now = fmean(values[:_FEW]), fmean(values[-_FEW:])
    if first > 0 and now < _ENTROPY_LEFT * first:
        what = (
            f"entropy is {now:.3g} nats, {now / first:.0%} of the first steps': all answers of a group become the same"
        )
        yield Alarm("entropy gone", what, "raise the temperature, the upper clip or algorithm.entropy_coef")


def _gradient(values: Sequence[float]) -> Iterator[Alarm]:
    if len(values) < 2 * _FEW:
        return
    usual, last = median(values[-50:-1]), max(values[-3:])
    if usual > 0 and last > _SPIKE * usual:
        what = f"gradient norm {last:.3g}, usually {usual:.3g}"
        yield Alarm("gradient spike", what, "look at the step's answers; lower train.grad_clip")


def _mismatch(values: Sequence[float]) -> Iterator[Alarm]:
    if len(values) >= _FEW and (now := fmean(values[-_FEW:])) > _MISMATCH_NATS:
        what = f"engines and trainer differ by {now:.3g} nats a token"
        yield Alarm("mismatch", what, "compare dtypes of engine and trainer; set algorithm.correction")


def _lengths(values: Sequence[float]) -> Iterator[Alarm]:
    if len(values) < 2 * _FEW:
        return
    first, now = fmean(values[:_FEW]), fmean(values[-_FEW:])
    if first > 0 and (now > _DRIFT * first or now < first / _DRIFT):
        what = f"answers have {now:,.0f} tokens, {first:,.0f} at the start"
        yield Alarm("length drift", what, "read the longest answers; see algorithm.overlong")


def of_answers(answers: Sequence[Sequence[int]], texts: Sequence[str]) -> Iterator[Alarm]:
    """Yield the alarms of a step's answers, given as tokens, and as (parts of) text."""
    long = [one for one in answers if len(one) >= _MIN_TOKENS]
    repeating = sum(map(is_repeating, long))
    if repeating > _REPEATING * len(answers):
        what = f"{repeating} of {len(answers)} answers repeat themselves to their end"
        yield Alarm(
            "endless text", what, "look at rollouts with the end `length`; mask or penalize them (algorithm.overlong)"
        )
    garbled = sum(1 for one in texts if one.count(_NOT_A_CHARACTER) > 0.02 * len(one) + 1)
    if texts and garbled > _REPEATING * len(texts):
        what = f"{garbled} of {len(texts)} answers are no valid text"
        yield Alarm("garbled text", what, "check that tokenizer and model belong together, and the weights' versions")


def is_repeating(answer: Sequence[int]) -> bool:
    """Return whether an answer's end is one short piece over and over."""
    tail = list(answer[-_TAIL_TOKENS:])
    if len(tail) < _MIN_TOKENS:
        return False
    pieces = Counter(zip(tail, tail[1:], tail[2:], tail[3:], strict=False))
    return len(pieces) < 0.2 * len(tail)


def of_fleet(status: Status, local: Container[str]) -> Iterator[Alarm]:
    """Yield the alarms of workers. `local` are those on the trainer's own devices, which train in between."""
    working = [one for one in status.workers if one.state == "active" and one.running and one.name not in local]
    paces = [one.tokens_per_s / one.running for one in working if one.tokens_per_s > 0]
    usual = median(paces) if len(paces) >= 3 else 0.0
    for one in working:
        if usual and one.tokens_per_s and one.tokens_per_s / one.running < _LAGS * usual:
            pace = one.tokens_per_s / one.running
            yield Alarm(
                "slow worker", f"{one.name} writes {pace:.1f} tokens a second and sample, others {usual:.1f}",
                f"look at its machine, or drain it: polyrl drain {one.name}",
            )  # fmt: skip
    yield from (found for one in status.workers if (found := _lag(one, status.published)) is not None)


def _lag(worker: WorkerStatus, published: int) -> Alarm | None:
    if worker.state == "active" and 0 <= worker.version < published - 1:
        behind = published - worker.version
        return Alarm("worker lags", f"{worker.name} runs version {worker.version}, {behind} behind", "see its network")
    if worker.last_heard_s > _SILENT_S:
        return Alarm("worker silent", f"nothing came from {worker.name} for {worker.last_heard_s:.0f} s", "see its log")
    return None
