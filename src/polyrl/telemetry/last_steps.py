"""The time of a run's last steps, by its parts, from its metrics, and advice on making them shorter.

Rules kept here: a trainer that has nothing to train says not what it waits for; answers, rewards or environments. The
reader of the journal says so, and without it no advice is given on such waits.
"""

from collections.abc import Mapping, Sequence
from statistics import median

from polyrl.scheduling.rules.scaling import BEGIN_S
from polyrl.telemetry.looks import show_seconds, show_tokens

NUM_STEPS = 10
_MUCH = 0.3
"""A share of a step that is worth a person's time."""
_SOME = 0.1
_PARTS = {"generate": "generating", "train": "training", "publish": "publishing", "save": "saving"}
_WRITING = ("answers", "last answers", "places", "no worker")
"""The trainer's waits while answers are written: keys of dashboard.waiting.WORDS."""


def tell(steps: Sequence[Mapping[str, object]], waits_for: str | None = None) -> list[str]:
    """Write the medians of the last steps, then advice; nothing before the first step.

    `waits_for`: what the trainer waits for most, a key of dashboard.waiting.WORDS; empty: nothing much; None: unknown.
    """
    last = steps[-NUM_STEPS:]
    total_s = _median(last, "time/step_total")
    if not total_s:
        return []
    parts = {part: _median(last, f"time/step_{part}") for part in _PARTS}
    trainer, fleet = _median(last, "idle/trainer_share"), _median(last, "idle/fleet_share")
    shown = ", ".join(f"{_PARTS[part]} {show_seconds(seconds)}" for part, seconds in parts.items() if seconds)
    which = "the last step" if len(last) == 1 else f"the last {len(last)} steps, medians"
    lines = [
        f"{which}: {show_seconds(total_s)}; {shown} (they overlap)",
        f"of a step, the trainer's devices had nothing to train for {trainer:.0%}, the remote fleet nothing to write "
        f"for {fleet:.0%}",
    ]
    return lines + _advice(last, total_s, trainer, fleet, waits_for)


def _advice(
    last: Sequence[Mapping[str, object]], total_s: float, trainer: float, fleet: float, waits_for: str | None
) -> list[str]:
    lines: list[str] = []
    useful, there = _median(last, "fleet/useful"), _median(last, "fleet/workers")
    publishing = _median(last, "time/step_publish") / total_s
    seeded_s, tokens = _median(last, "seeding/t_seed_s"), _median(last, "tokens/kept")
    if seeded_s / total_s > _MUCH:
        many = f" (the scheduler advises {useful:.0f})" if useful > there else ""
        would = f"remote workers{many} would do that beside it"
        if seeded_s < BEGIN_S:
            wrote = f"{show_tokens(tokens)} tokens in {show_seconds(seeded_s)}"
            would = f"no worker would help, since it needs about {BEGIN_S} s a step to begin, and they write {wrote}"
        lines.append(
            f"the trainer's own devices write for {seeded_s / total_s:.0%} of a step before they train: {would}"
        )
    elif trainer > _MUCH and waits_for in _WRITING:
        more = f"more workers (the scheduler advises {useful:.0f}), " if useful > there else ""
        lines.append(
            f"writing is what takes long: {more}rounds.tail_batching for a long tail, or "
            'train.mode = "async" so that steps do not wait for it, where these are off'
        )
    elif fleet > _MUCH and waits_for == "":
        lines.append(
            'training is what takes long: fewer workers cost less, or train.mode = "async" has them go on, '
            "where it is off"
        )
    if publishing > _SOME:
        lines.append(f"publishing takes {publishing:.0%} of a step: look at docs/concepts/weights.md#weight-transfer")
    return lines


def _median(steps: Sequence[Mapping[str, object]], name: str) -> float:
    """Return the median over the steps that have the metric; 0 if none has."""
    found = [float(value) for one in steps if isinstance(value := one.get(name), int | float)]
    return median(found) if found else 0.0
