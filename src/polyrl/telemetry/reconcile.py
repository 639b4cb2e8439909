"""Checks that an account adds up: each sum of the ledger against a second way to the same number.

    a worker's seconds    by activity; its lives, from when it was seen to join to when it was seen to go
    a host's seconds      as the ledger counts them; from when it was seen to join to when it was seen to go; so are
                          those of a reward worker
    dollars               of workers, hosts and reward workers, and those times times their prices; of the trainer, and
                          its price times wall clock, but for the time in which its process was gone
    tokens, samples,      kept and trained, and the sum of all steps
    prompts

Amounts started and arrived against what became of them are laws of the scheduler (scheduling/invariants.py).

Rules kept here: every law that does not hold is named with both numbers. Seconds and dollars are sums of many floats:
they agree to a millionth.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from polyrl.scheduling.core.ledger import OTHERS, HostLine, RewardWorkerLine
from polyrl.telemetry.account import Account

_HOUR_S = 3600.0
_RELATIVE = 1e-6
_ABSOLUTE = 1e-6


def broken_sums(account: Account) -> list[str]:
    """Return a line for each sum that does not hold."""
    return [*_seconds_and_dollars(account), *_steps(account)]


def _seconds_and_dollars(account: Account) -> Iterator[str]:
    lines = account.ledger.workers
    expected: dict[str, tuple[float, float]] = {**account.paid_before}
    for life in account.lives:
        known = [life.ended_at, life.missed_since, account.now]
        end = next(moment for moment in known if moment is not None)
        life_s = end - life.began_at + life.starting_s
        seconds, usd = expected.get(life.worker, (0.0, 0.0))
        expected[life.worker] = seconds + life_s, usd + life.usd(end)
    paid = {name: (line.paid_s, line.usd) for name, line in lines.items()}
    if OTHERS in lines:  # who went long ago has no line of its own: all together must be right
        paid, expected = ({"(all)": _sums(one)} for one in (paid, expected))
    for name, (paid_s, paid_usd) in paid.items():
        seconds, usd = expected.get(name, (0.0, 0.0))
        yield from _close(f"seconds of worker {name}", paid_s, "its time in the fleet", seconds)
        yield from _close(f"dollars of worker {name}", paid_usd, "its time in the fleet times its price", usd)
    yield from _paid("host", account.ledger.hosts, account.hosts)
    yield from _paid("reward worker", account.ledger.reward_workers, account.reward_workers)
    there_s = account.now - account.started_at - account.trainer_gone_s
    wall_usd = there_s * account.config.trainer_usd_per_hour / _HOUR_S
    yield from _close(
        "dollars of the trainer", account.ledger.trainer_usd(account.now), "wall clock times its price", wall_usd
    )


def _paid(
    kind: str, lines: Mapping[Any, HostLine] | Mapping[str, RewardWorkerLine], seen: Mapping[str, tuple[float, float]]
) -> Iterator[str]:
    paid = {str(name): (line.seconds, line.usd) for name, line in lines.items()}
    expected = dict(seen)
    if OTHERS in paid:
        paid, expected = ({"(all)": _sums(one)} for one in (paid, expected))
    for name, (paid_s, paid_usd) in paid.items():
        seconds, usd = expected.get(name, (0.0, 0.0))
        yield from _close(f"seconds of {kind} {name}", paid_s, "its time in the run", seconds)
        yield from _close(f"dollars of {kind} {name}", paid_usd, "its time in the run times its price", usd)


def _sums(of_peers: Mapping[str, tuple[float, float]]) -> tuple[float, float]:
    return sum(seconds for seconds, _ in of_peers.values()), sum(usd for _, usd in of_peers.values())


def _steps(account: Account) -> Iterator[str]:
    """Compare with the lines of all steps; a journal that starts in mid-run does not hold all of them."""
    if not account.is_whole:
        return
    ledger, lines = account.ledger, account.lines
    discarded = sum(sum(line.tokens_discarded.values()) for line in lines)
    for what, number, of_steps in (
        ("tokens kept", ledger.tokens_kept, sum(line.tokens_trained for line in lines)),
        ("samples trained", ledger.samples_trained, sum(line.num_samples for line in lines)),
        ("prompts trained", ledger.prompts_trained, sum(line.num_groups for line in lines)),
        ("tokens discarded until the last step", sum(ledger.discarded_told.values()), discarded),
    ):
        if number != of_steps:
            yield f"{what} {number:,}, but of all steps {of_steps:,}"


def _close(what: str, number: float, other: str, expected: float) -> Iterator[str]:
    if not abs(number - expected) <= max(_ABSOLUTE, _RELATIVE * abs(expected)):
        yield f"{what} are {number:.6f}, but {other} is {expected:.6f}"
