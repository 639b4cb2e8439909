"""Alarms: what in a run's metrics, answers and fleet a person should look at, as pure functions of what was measured.

Rules kept here: an alarm says what was seen, what is usual, what it costs, and what to do. A single bad step raises no
alarm but that of gradients. Nothing here stops a run.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import NamedTuple

from polyrl.telemetry.looks import show_seconds
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
_CENT = 0.01
_ENOUGH_WORKERS = 3
"""Of fewer, it cannot be told which is the slow one."""
_SILENT_S = 10.0
_REPEATING = 0.2
"""Share of a step's answers."""
_TAIL_TOKENS = 256
_MIN_TOKENS = 64
_NOT_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Alarm(NamedTuple):
    name: str
    what: str
    costs: str
    do: str
    of: str = ""
    """The worker that it is about; empty: no single one."""


def of_metrics(series: Series) -> Iterator[Alarm]:
    """Yield the alarms of a run's metrics."""
    yield from _reward(series)
    yield from _nothing_learned(series)
    if fmean(series.get("reward/mean", ())[-_FEW:] or (0.0,)) < _SOLVED:  # where all is solved, answers may agree
        yield from _entropy(series.get("actor/entropy", ()))
    yield from _gradient(series.get("actor/grad_norm", ()))
    yield from _left_out(series)
    yield from _mismatch(series.get("actor/mismatch_kl", ()))
    yield from _lengths(series)
    yield from _staleness(series)


def _reward(series: Series) -> Iterator[Alarm]:
    values = series.get("reward/mean", ())
    if len(values) < 2 * _FEW:
        return
    means = [fmean(values[place : place + _FEW]) for place in range(len(values) - _FEW + 1)]
    best, now, low = max(means), means[-1], min(means[0], *values)
    if best - now > _COLLAPSED * (best - low) and best - now > 0.05 * max(1.0, abs(best)):
        num = len(means) - 1 - means.index(best)
        yield Alarm(
            "reward collapsed",
            f"mean reward fell from {best:.3g} to {now:.3g}, means of {_FEW} steps",
            f"{_spent(series, num)} since the best steps, {num} steps ago",
            "read the newest answers; go back to a checkpoint with a lower learning rate",
        )


def _nothing_learned(series: Series) -> Iterator[Alarm]:
    norms, means = series.get("actor/grad_norm", ()), series.get("reward/mean", ())
    num = next((place for place, one in enumerate(reversed(norms)) if one), len(norms))
    if num < _FEW:
        return
    mean = fmean(means[-num:]) if means else 0.0
    yield Alarm(
        "nothing learned",
        f"the gradient was 0 in the last {num} steps: all answers to a prompt have the same reward, mean {mean:.3g}",
        f"{_spent(series, num)} in those steps",
        "hold rewards against expected answers, in Rollouts: a reward function that is wrong looks like this; "
        f"if it is right, use {'harder' if mean >= _SOLVED else 'easier'} prompts or more answers to each",
    )


def _spent(series: Series, num_steps: int) -> str:
    """Return the time and the money of the last steps."""
    seconds = sum(series.get("time/step_total", ())[-num_steps:])
    usd = sum(series.get("cost/usd_step", ())[-num_steps:])
    return show_seconds(seconds) + (f" and ${usd:,.2f}" if usd >= _CENT else "")


def _entropy(values: Sequence[float]) -> Iterator[Alarm]:
    if len(values) < 2 * _FEW:
        return
    first, now = fmean(values[:_FEW]), fmean(values[-_FEW:])
    if first > 0 and now < _ENTROPY_LEFT * first:
        yield Alarm(
            "entropy gone",
            f"entropy is {now:.3g} nats, {now / first:.0%} of the first steps'",
            "all answers of a group become the same, and such a group teaches nothing",
            "raise the temperature, the upper clip or algorithm.entropy_coef",
        )


def _gradient(values: Sequence[float]) -> Iterator[Alarm]:
    if len(values) < 2 * _FEW:
        return
    usual, last = median(values[-50:-1]), max(values[-3:])
    if usual > 0 and last > _SPIKE * usual:
        yield Alarm(
            "gradient spike",
            f"gradient norm {last:.3g}, usually {usual:.3g}",
            "one such update can undo many steps",
            "look at the step's answers; lower optimizer.grad_clip",
        )


def _left_out(series: Series) -> Iterator[Alarm]:
    """Yield an alarm for a gradient that is no number. That is not told as one; where there was none, 0 is told."""
    last = series.get("actor/skipped_updates", ())[-_FEW:]
    if (num := sum(1 for one in last if one)) and 0.0 not in series.get("actor/grad_norm", ())[-_FEW:]:
        yield Alarm(
            "gradient is no number",
            f"{num} of the last {len(last)} steps had a gradient that is infinite or no number, and changed nothing",
            f"{_spent(series, num)} in as many steps",
            "read the answers of these steps; where it goes on, lower optimizer.lr, or go back to a checkpoint",
        )


def _mismatch(values: Sequence[float]) -> Iterator[Alarm]:
    if len(values) >= _FEW and (now := fmean(values[-_FEW:])) > _MISMATCH_NATS:
        yield Alarm(
            "mismatch",
            f"engines and trainer differ by {now:.3g} nats a token",
            "updates are made for probabilities that no answer was drawn with",
            "compare dtypes of engine and trainer; set algorithm.correction",
        )


def _lengths(series: Series) -> Iterator[Alarm]:
    values, times = series.get("token/response_length/mean", ()), series.get("time/step_total", ())
    if len(values) < 2 * _FEW:
        return
    first, now = fmean(values[:_FEW]), fmean(values[-_FEW:])
    if first > 0 and (now > _DRIFT * first or now < first / _DRIFT):
        costs = "what a step costs depends on it"
        if len(times) >= 2 * _FEW:
            costs = f"a step takes {show_seconds(fmean(times[-_FEW:]))}, {show_seconds(fmean(times[:_FEW]))} at first"
        yield Alarm(
            "length drift",
            f"answers have {now:,.0f} tokens, {first:,.0f} at the start",
            costs,
            "read the longest answers; see algorithm.overlong",
        )


def _staleness(series: Series) -> Iterator[Alarm]:
    stale = series.get("staleness/mean", ())[-_FEW:]
    if stale and fmean(stale) > _STALE_VERSIONS:
        clipped = [fmean(series.get(f"actor/clip_frac_{end}", ())[-_FEW:] or (0.0,)) for end in ("low", "high")]
        yield Alarm(
            "stale data",
            f"tokens trained on are {fmean(stale):.1f} versions old, mean of the last {len(stale)} steps",
            f"{sum(clipped):.1%} of the tokens are clipped and teach nothing; the others pull from an older policy",
            "lower train.max_staleness; where complete rounds wait for the trainer, fewer workers cost less, and where "
            "answers take long, more of them help",
        )


def of_answers(answers: Sequence[Sequence[int]], texts: Sequence[str]) -> Iterator[Alarm]:
    """Yield the alarms of a step's answers, given as tokens, and as (parts of) text."""
    repeating = [one for one in answers if len(one) >= _MIN_TOKENS and is_repeating(one)]
    if len(repeating) > _REPEATING * len(answers):
        share = sum(map(len, repeating)) / sum(map(len, answers))
        yield Alarm(
            "endless text",
            f"{len(repeating)} of {len(answers)} answers repeat themselves to their end",
            f"{share:.0%} of the step's tokens are in them",
            "look at rollouts with the end `length`; mask or penalize them (algorithm.overlong)",
        )
    garbled = sum(1 for one in texts if one.count(_NOT_A_CHARACTER) > 0.02 * len(one) + 1)
    if texts and garbled > _REPEATING * len(texts):
        yield Alarm(
            "garbled text",
            f"{garbled} of {len(texts)} answers are no valid text",
            f"{garbled / len(texts):.0%} of the answers can hardly be paid for what they say",
            "check that tokenizer and model belong together, and the weights' versions",
        )


def is_repeating(answer: Sequence[int]) -> bool:
    """Return whether an answer's end is one short piece over and over."""
    tail = list(answer[-_TAIL_TOKENS:])
    if len(tail) < _MIN_TOKENS:
        return False
    pieces = Counter(zip(tail, tail[1:], tail[2:], tail[3:], strict=False))
    return len(pieces) < 0.2 * len(tail)


def of_fleet(status: Status, paces: Mapping[str, float], max_staleness: int = 1) -> Iterator[Alarm]:
    """Yield the alarms of workers; the pace of the trainer's own devices tells nothing.

    `paces`: tokens a second and sample of each worker's newest answers. `max_staleness`: the number of versions that a
    worker may be behind.
    """
    there = [one for one in status.workers if one.state == "active" and not one.local and one.name in paces]
    usual = median(paces[one.name] for one in there) if len(there) >= _ENOUGH_WORKERS else 0.0
    for one in there:
        pace = paces[one.name]
        if pace < _LAGS * usual:
            yield Alarm(
                "slow worker",
                f"{one.name} writes {pace:.1f} tokens a second and sample, others {usual:.1f}",
                f"its samples take {usual / pace:.1f} times as long, and steps wait for them{_price(one)}",
                f"look at its machine, or drain it, in Fleet or with polyrl drain {one.name}",
                one.name,
            )
    yield from (
        found
        for one in status.workers
        if (found := _behind_or_silent(one, status.published - max_staleness)) is not None
    )


def _behind_or_silent(worker: WorkerStatus, oldest: int) -> Alarm | None:
    """Return the alarm of a worker whose version is older than `oldest`, or that is not heard of."""
    if worker.state == "active" and 0 <= worker.version < oldest:
        what = f"{worker.name} runs version {worker.version}, {oldest - worker.version} older than is allowed"
        costs = f"it writes nothing for a step until it has pulled a newer one{_price(worker)}"
        return Alarm("worker lags", what, costs, "see its log and its network; drain it if it does not catch up")
    if worker.last_heard_s > _SILENT_S:
        what = f"nothing came from {worker.name} for {worker.last_heard_s:.0f} s"
        costs = f"its {worker.running} samples stand still until it is given up{_price(worker)}"
        return Alarm("worker silent", what, costs, "see its log, and whether its machine is there")
    return None


def _price(worker: WorkerStatus) -> str:
    return f"; it costs ${worker.price_usd_per_hour:.2f} an hour" if worker.price_usd_per_hour else ""
