"""Alarms: what in a run's metrics, answers and fleet a person should look at, as pure functions of what was measured.

Rules kept here: an alarm says what was seen, what is usual, what it costs, and what to do. A single bad step raises no
alarm but that of gradients. Nothing here stops a run.
"""

import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean, median
from typing import Any, NamedTuple

from polyrl.telemetry.looks import show_seconds
from polyrl.wire.control import Status, WorkerStatus

Series = Mapping[str, Sequence[float]]
"""Metrics by name, the values that were told, in order."""

_FEW = 5
"""Steps whose mean is compared: fewer are noise."""
_COLLAPSED = 0.5
_NEARLY = 0.1
"""The share of a fall after which it has begun."""
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
_MOST_PULLS = 3
_REPEATING = 0.2
"""Share of a step's answers."""
_TAIL_TOKENS = 256
_MIN_TOKENS = 64
_OF_A_COLLAPSE = ("nothing learned", "length drift", "endless text", "garbled text", "entropy gone", "gradient spike")
"""Alarms that are signs of a collapse once the reward has fallen."""
_WAITS = 0.3
"""The share of the trainer's time in waits for answers from which on the fleet is the slower one."""
_NOT_A_CHARACTER = "\N{REPLACEMENT CHARACTER}"


class Alarm(NamedTuple):
    name: str
    what: str
    costs: str
    do: str
    of: str = ""
    """The worker that it is about; empty: no single one."""
    why: str = ""
    """The cause, as far as it is known."""
    run: str = ""
    """A command that does it."""


class AlarmContext(NamedTuple):
    """Other facts of a run, from which causes and remedies are told."""

    recipe: Mapping[str, Any] | None = None
    """As the run's directory has it."""
    run_dir: str = "RUN"
    checkpoints: Sequence[int] = ()
    """The steps before each of them."""
    last_step: int = -1
    status: Status | None = None
    waits_for_fleet: float | None = None
    """The share of the trainer's time in which it waits for answers; None: not known."""

    def setting(self, section: str, key: str) -> Any:
        """Return what the recipe says; None: nothing."""
        return (self.recipe or {}).get(section, {}).get(key)

    def named(self, section: str, key: str) -> str:
        """Return a setting's name, with its present value where that is known."""
        value = self.setting(section, key)
        return f"{section}.{key}" if value is None else f"{section}.{key} ({value} now)"


def of_metrics(series: Series, around: AlarmContext | None = None) -> Iterator[Alarm]:
    """Yield the alarms of a run's metrics."""
    around = around or AlarmContext()
    yield from _reward(series)
    yield from _nothing_learned(series)
    if fmean(series.get("reward/mean", ())[-_FEW:] or (0.0,)) < _SOLVED:  # where all is solved, answers may agree
        yield from _entropy(series, around)
    yield from _gradient(series.get("actor/grad_norm", ()), around)
    yield from _left_out(series)
    yield from _mismatch(series.get("actor/mismatch_kl", ()))
    yield from _lengths(series)
    yield from _staleness(series, around)


def _reward(series: Series) -> Iterator[Alarm]:
    values = series.get("reward/mean", ())
    if len(values) < 2 * _FEW:
        return
    means = [fmean(values[place : place + _FEW]) for place in range(len(values) - _FEW + 1)]
    best, now, low = max(means), means[-1], min(means[0], *values)
    if best - now > _COLLAPSED * (best - low) and best - now > 0.05 * max(1.0, abs(best)):
        num = _since_best(values)
        yield Alarm(
            "reward collapsed",
            f"mean reward fell from {best:.3g} to {now:.3g}, means of {_FEW} steps",
            f"{_spent(series, num)} since the best steps, {num} steps ago",
            "read the newest answers; go back to a checkpoint with a lower learning rate",
        )


def verdict(raised: Sequence[Alarm], series: Series, around: AlarmContext) -> list[Alarm]:
    """Return the alarms, with those of a collapse as a single one that comes first."""
    fell = next((one for one in raised if one.name == "reward collapsed"), None)
    if fell is None:
        return [*raised]
    others = [one for one in raised if one.name in _OF_A_COLLAPSE]
    rate = around.setting("optimizer", "lr")
    why = "a learning rate that is too high is the usual cause"
    if isinstance(rate, int | float):
        why += f": optimizer.lr is {rate:g} now"
    before = around.last_step - _since_best(series.get("reward/mean", ()))
    kept = max((one for one in around.checkpoints if 0 < one <= before + 1), default=None)
    begin = "begin anew" if kept is None else f"go back to the checkpoint of step {kept}, the newest before it fell"
    do = f"stop it, and {begin}, with a lower learning rate (a tenth, say)"
    if kept is None:
        do += "; no checkpoint from before it fell is kept"
    collapse = fell._replace(
        name="run collapsed",
        what="; ".join([fell.what, *(one.what for one in others)]),
        why=why,
        do=f"{do}. The newest answers, in Rollouts, show what it learned instead",
        run=_go_back(around, kept, rate),
    )
    return [collapse, *(one for one in raised if one is not fell and one not in others)]


def _since_best(rewards: Sequence[float]) -> int:
    """Return how many steps ago the last of the best few steps was: those nearly as good as the best count."""
    means = [fmean(rewards[place : place + _FEW]) for place in range(len(rewards) - _FEW + 1)]
    good = max(means) - _NEARLY * (max(means) - means[-1])
    return next(ago for ago, mean in enumerate(reversed(means)) if mean >= good)


def _go_back(around: AlarmContext, step: int | None, rate: Any) -> str:
    """Return the commands that train again from a checkpoint, or from the beginning."""
    run = around.run_dir.rstrip("/")
    begin = f"polyrl train {shlex.quote(f'{run}/recipe.toml')} --run-dir {shlex.quote(f'{run}-again')}"
    begin += f" optimizer.lr={rate / 10:g}" if isinstance(rate, int | float) else ""
    if step is None:
        return begin
    model = shlex.quote(f"{run}-step-{step}")
    return f"polyrl export --step {step} {shlex.quote(run)} {model} && {begin} model.path={model}"


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


def _entropy(series: Series, around: AlarmContext) -> Iterator[Alarm]:
    values = series.get("actor/entropy", ())
    if len(values) < 2 * _FEW:
        return
    first, now = fmean(values[:_FEW]), fmean(values[-_FEW:])
    if first > 0 and now < _ENTROPY_LEFT * first:
        yield Alarm(
            "entropy gone",
            f"entropy is {now:.3g} nats, {now / first:.0%} of what it was in the first steps",
            "all answers of a group become the same, and such a group teaches nothing: the last "
            f"{_FEW} steps took {_spent(series, _FEW)}",
            f"raise {around.named('algorithm', 'entropy_coef')}, the temperature or the upper clip",
            why="the policy has become sure of its answers, right or wrong",
        )


def _gradient(values: Sequence[float], around: AlarmContext) -> Iterator[Alarm]:
    if len(values) < 2 * _FEW:
        return
    usual, last = median(values[-50:-1]), max(values[-3:])
    if usual > 0 and last > _SPIKE * usual:
        yield Alarm(
            "gradient spike",
            f"gradient norm {last:.3g}, usually {usual:.3g}",
            "one such update can undo many steps",
            f"look at the step's answers; lower {around.named('optimizer', 'grad_clip')}",
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


def _staleness(series: Series, around: AlarmContext) -> Iterator[Alarm]:
    stale = series.get("staleness/mean", ())[-_FEW:]
    if not stale or fmean(stale) <= _STALE_VERSIONS:
        return
    clipped = [fmean(series.get(f"actor/clip_frac_{end}", ())[-_FEW:] or (0.0,)) for end in ("low", "high")]
    why, do = _why_stale(around)
    yield Alarm(
        "stale data",
        f"tokens trained on are {fmean(stale):.1f} versions old, mean of the last {len(stale)} steps",
        f"{sum(clipped):.1%} of the tokens are clipped and teach nothing; the others pull from an older policy. The "
        f"last {len(stale)} steps took {_spent(series, len(stale))}",
        f"lower {around.named('train', 'max_staleness')}{do}",
        why=why,
    )


def _why_stale(around: AlarmContext) -> tuple[str, str]:
    """Return why tokens are old, and what helps beside a lower bound: empty where it is not known."""
    share, allowed = around.waits_for_fleet, around.setting("train", "max_staleness")
    causes = [] if allowed is None else [f"train.max_staleness = {allowed} allows it"]
    do = ""
    if share is not None and share >= _WAITS:
        causes.append(f"the trainer waits for answers {share:.0%} of its time: the fleet is slower than the trainer")
        do = "; more or faster workers help"
    elif share is not None:
        causes.append(f"the trainer waits for answers {share:.0%} of its time: complete rounds wait for it, and age")
        one = around.status is not None and sum(not one.local for one in around.status.workers) == 1
        do = f"; {'a slower worker costs' if one else 'fewer workers cost'} less, and the trainer is as fast"
    return "; ".join([*causes, *pulls(around.status)]), do


def pulls(status: Status | None) -> list[str]:
    """Return a sentence for each worker that pulls a version, up to three."""
    there = [] if status is None else [one for one in status.workers if one.state == "pulling"]
    found: list[str] = []
    for one in there[:_MOST_PULLS]:
        assert status is not None
        age_s = next((wait.age_s for wait in status.waits if wait.what == "pull" and wait.of == one.name), None)
        since = "" if age_s is None else f" for {show_seconds(age_s)}"
        behind = status.published - one.pulling
        newer = f", and the trainer is {behind} versions further" if behind > 0 else ""
        found.append(f"{one.name} has been pulling version {one.pulling}{since} and writes nothing meanwhile{newer}")
    return found


def of_answers(answers: Sequence[Sequence[int]], texts: Sequence[str]) -> Iterator[Alarm]:
    """Yield the alarms of a step's answers, given as tokens, and as (parts of) text."""
    repeating = [one for one in answers if len(one) >= _MIN_TOKENS and is_repeating(one)]
    if len(repeating) > _REPEATING * len(answers):
        share = sum(map(len, repeating)) / sum(map(len, answers))
        yield Alarm(
            "endless text",
            f"{len(repeating)} of {len(answers)} answers repeat themselves to their end",
            f"{share:.0%} of the step's tokens are in them",
            "look at rollouts that ended by their length, in Rollouts; mask or penalize them (algorithm.overlong)",
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


def of_fleet(
    status: Status, paces: Mapping[str, float], max_staleness: int = 1, run_dir: str = "RUN"
) -> Iterator[Alarm]:
    """Yield the alarms of workers; the pace of the trainer's own devices tells nothing.

    `paces`: tokens a second per sample of each worker's newest answers. `max_staleness`: the number of versions that a
    worker may be behind.
    """
    there = [one for one in status.workers if one.state == "active" and not one.local and one.name in paces]
    usual = median(paces[one.name] for one in there) if len(there) >= _ENOUGH_WORKERS else 0.0
    for one in there:
        pace = paces[one.name]
        if pace < _LAGS * usual:
            yield Alarm(
                "slow worker",
                f"{one.name} writes {pace:.1f} tokens a second per sample, others {usual:.1f}",
                f"its samples take {usual / pace:.1f} times as long, and steps wait for them{_price(one)}",
                "look at its machine, or drain it, in Fleet or with the command",
                one.name,
                run=drain_command(one.name, run_dir),
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


def drain_command(worker: str, run_dir: str) -> str:
    return f"polyrl drain {shlex.quote(worker)} --run-dir {shlex.quote(run_dir)}"


def _price(worker: WorkerStatus) -> str:
    return f"; it costs ${worker.price_usd_per_hour:.2f} an hour" if worker.price_usd_per_hour else ""
