"""An account of a run as a table for a person and as JSON: sums that hold, with what is open beside what is decided."""

from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from msgspec import structs

from polyrl.telemetry.account import Account
from polyrl.telemetry.looks import CAUSES, MOVES, OUTCOMES, show_seconds

ACTIVITIES = ("starting", "pulling", "generating", "idle", "draining", "training", "validating")
_MAX_ROWS = 40
_LONG_RUN_S = 1000.0
_SHOWN_S = 0.05
_MILLION = 1e6

TableRow = tuple[str, ...]


def as_json(account: Account, name: str, broken: list[str] | None) -> dict[str, Any]:
    """Everything that the table shows, and every step. `broken_laws` is null when they were not checked."""
    ledger = account.ledger
    dollars = _dollars(account)
    by_step = _by_step(account)
    return {
        "run": name,
        "about": account.about,
        "caveat": account.caveat or None,
        "records": account.num_records,
        "seconds": account.now - account.started_at,
        "seconds_without_trainer": account.trainer_gone_s,
        "steps": len(account.lines),
        "rounds": dict(ledger.rounds),
        "cut_short": account.cut_short or None,
        "difference": account.difference or None,
        **_became(account),
        "workers": [
            {
                "worker": name,
                "price_usd_per_hour": line.price_usd_per_hour,
                "seconds": dict(line.seconds),
                "usd": line.usd,
                "joins": line.num_joins,
                "losses": line.num_losses,
            }
            for name, line in ledger.workers.items()
        ],
        "hosts": [{"host": name, **structs.asdict(line)} for name, line in ledger.hosts.items()],
        "reward_workers": [
            {"reward_worker": name, **structs.asdict(line)} for name, line in ledger.reward_workers.items()
        ],
        "usd": {
            **dollars._asdict(),
            "total": sum(dollars),
            "per_step": fmean(usd for _, usd in by_step) if by_step else None,
            "per_mtok": _per_mtok(account),
            "by_step": [{"step": step, "usd": usd} for step, usd in by_step],
        },
        "checks": account.num_checks,
        "broken_laws": broken,
    }


def _became(account: Account) -> dict[str, dict[str, Any]]:
    """Return what became of everything that was started or arrived."""
    ledger, still = account.ledger, account.open
    return {
        "prompts": {
            "started": ledger.prompts_started,
            "trained": ledger.prompts_trained,
            "dropped": dict(ledger.prompts_dropped),
            "deferred": still.deferred_prompts,
            "open": still.prompts,
        },
        "samples": {
            "started": ledger.samples_started,
            "trained": ledger.samples_trained,
            "answered": ledger.samples_answered,
            "discarded": dict(ledger.samples_discarded),
            "open": still.samples,
            "moves": dict(ledger.moves),
        },
        "tokens": {
            "arrived": ledger.tokens_arrived,
            "kept": ledger.tokens_kept,
            "answered": ledger.tokens_answered,
            "discarded": dict(ledger.tokens_discarded),
            "open": still.tokens,
            "reprefilled": ledger.tokens_reprefilled,
        },
        "episodes": {
            "begun": ledger.episodes_begun,
            "ended": dict(ledger.episodes_ended),
            "calls": ledger.num_calls,
            "hosts_hung": ledger.hosts_hung,
        },
    }


class _Dollars(NamedTuple):
    """Dollars of workers, hosts, reward workers and the trainer."""

    trainer: float
    workers: float
    hosts: float
    reward_workers: float


def _dollars(account: Account) -> _Dollars:
    ledger = account.ledger
    paid = (ledger.workers.values(), ledger.hosts.values(), ledger.reward_workers.values())
    return _Dollars(ledger.trainer_usd(account.now), *(sum(line.usd for line in lines) for lines in paid))


def _by_step(account: Account) -> list[tuple[int, float]]:
    """Dollars from the end of one step to the end of the next; of the first, since the run began."""
    before = [0.0 if account.is_whole or not account.lines else account.lines[0].usd]
    before += [line.usd for line in account.lines]
    return [(line.step, line.usd - usd) for line, usd in zip(account.lines, before, strict=False)]


def _per_mtok(account: Account) -> float | None:
    """Divide all dollars, also those of what was thrown away, by the tokens that were trained."""
    kept = account.ledger.tokens_kept
    return sum(_dollars(account)) / kept * _MILLION if kept else None


# For a person


def as_text(account: Account, name: str, *, verified: bool) -> str:
    """Return the table as text. `verified` adds what was checked."""
    parts = [_title(account, name), account.caveat]
    if account.cut_short:
        parts.append(f"the journal ends inside a record, as a killed run leaves it: {account.cut_short}")
    parts.append(_columns([*_counts(account)], "<><"))
    if account.ledger.workers:
        parts.append(_columns([*_seconds(account)], "<" + ">" * 20))
        if (hidden := len(account.ledger.workers) - _MAX_ROWS) > 0:
            parts.append(f"... and {hidden} more workers; --json has all of them")
    if account.ledger.hosts:
        parts.append(_columns([*_host_seconds(account)], "<" + ">" * 20))
        if (hidden := len(account.ledger.hosts) - _MAX_ROWS) > 0:
            parts.append(f"... and {hidden} more hosts; --json has all of them")
    if account.ledger.reward_workers:
        parts.append(_columns([*_reward_worker_seconds(account)], "<" + ">" * 20))
        if (hidden := len(account.ledger.reward_workers) - _MAX_ROWS) > 0:
            parts.append(f"... and {hidden} more reward workers; --json has all of them")
    parts += _dollar_lines(account)
    if verified:
        parts.append(
            f"verified: {account.num_records:,} records gave the same commands, all laws held at "
            f"{account.num_checks:,} checks,\nseconds and dollars agree with wall clock times price"
        )
    return "\n".join(part for part in parts if part)


def _title(account: Account, name: str) -> str:
    num_steps = len(account.lines)
    rounds = ", ".join(f"{num} {kind}" for kind, num in account.ledger.rounds.items() if num)
    steps = f"{num_steps} step{'' if num_steps == 1 else 's'} trained"
    took = show_seconds(account.now - account.started_at)
    if account.trainer_gone_s >= _SHOWN_S:
        took += f", no trainer was there for {show_seconds(account.trainer_gone_s)} of it"
    return f"{name}: {steps} in {took}; rounds opened: {rounds or 'none'}"


def _counts(account: Account) -> Iterator[TableRow]:
    ledger, still = account.ledger, account.open
    asked = "to clients beside the trainer"
    yield "prompts started", f"{ledger.prompts_started:,}", ""
    yield "  trained", f"{ledger.prompts_trained:,}", ""
    yield from _causes(ledger.prompts_dropped, "dropped: ", {})
    yield "  deferred", f"{still.deferred_prompts:,}", "wait for a long round"
    yield "  open", f"{still.prompts:,}", ""
    yield "samples started", f"{ledger.samples_started:,}", ""
    yield "  trained", f"{ledger.samples_trained:,}", ""
    yield from _causes({"answered": ledger.samples_answered}, "", {"answered": asked})
    yield from _causes(ledger.samples_discarded, "", CAUSES)
    yield "  open", f"{still.samples:,}", ""
    yield from _episodes(account)
    moves = ", ".join(f"{MOVES.get(cause, cause)} {num:,}" for cause, num in ledger.moves.items() if num)
    yield "samples moved", f"{sum(ledger.moves.values()):,}", moves
    yield "tokens arrived", f"{ledger.tokens_arrived:,}", ""
    yield "  kept", f"{ledger.tokens_kept:,}", "trained"
    yield from _causes({"answered": ledger.tokens_answered}, "", {"answered": asked})
    yield from _causes(ledger.tokens_discarded, "", CAUSES)
    yield "  open", f"{still.tokens:,}", "of samples that are not decided"
    yield "prefilled again", f"{ledger.tokens_reprefilled:,}", "tokens, because a sample moved; not part of the sum"


def _episodes(account: Account) -> Iterator[TableRow]:
    ledger = account.ledger
    if not ledger.episodes_begun:
        return
    again = "also those that began again, because their host was lost or they failed"
    yield "episodes begun", f"{ledger.episodes_begun:,}", again
    yield from _causes(ledger.episodes_ended, "", OUTCOMES)
    yield "calls of episodes", f"{ledger.num_calls:,}", ""
    if ledger.hosts_hung:
        yield (
            "hosts that hung",
            f"{ledger.hosts_hung:,}",
            "none of their episodes moved any more; they began again elsewhere",
        )


def _causes(counts: Mapping[str, int], before: str, words: Mapping[str, str]) -> Iterator[TableRow]:
    for cause, num in sorted(counts.items(), key=lambda item: -item[1]):
        if num:
            yield f"  {before}{cause}", f"{num:,}", words.get(cause, "")


def _seconds(account: Account) -> Iterator[TableRow]:
    lines = account.ledger.workers
    sums = {one: sum(line.seconds.get(one, 0.0) for line in lines.values()) for one in ACTIVITIES}
    shown = [activity for activity in ACTIVITIES if sums[activity] >= _SHOWN_S]
    num_digits = 1 if account.now - account.started_at < _LONG_RUN_S else 0

    def row(name: str, seconds: Mapping[str, float], price: str, usd: float, joins: int, losses: int) -> TableRow:
        cells = [*(seconds.get(activity, 0.0) for activity in shown), sum(seconds.values())]
        return name, *(f"{cell:,.{num_digits}f}" for cell in cells), price, _usd(usd), str(joins), str(losses)

    yield "seconds of", *shown, "in all", "$/h", "$", "joined", "lost"
    for name, line in [*lines.items()][:_MAX_ROWS]:
        yield row(name, line.seconds, f"{line.price_usd_per_hour:,.2f}", line.usd, line.num_joins, line.num_losses)
    if len(lines) > 1:
        joins, losses = sum(line.num_joins for line in lines.values()), sum(line.num_losses for line in lines.values())
        yield row("all", sums, "", sum(line.usd for line in lines.values()), joins, losses)


def _host_seconds(account: Account) -> Iterator[TableRow]:
    lines = account.ledger.hosts
    num_digits = 1 if account.now - account.started_at < _LONG_RUN_S else 0
    yield "seconds of", "in all", "of episodes", "$/h", "$", "joined", "lost"
    for name, line in [*lines.items()][:_MAX_ROWS]:
        seconds = (f"{one:,.{num_digits}f}" for one in (line.seconds, line.episode_seconds))
        price = f"{line.price_usd_per_hour:,.2f}"
        yield name, *seconds, price, _usd(line.usd), str(line.num_joins), str(line.num_losses)


def _reward_worker_seconds(account: Account) -> Iterator[TableRow]:
    lines = account.ledger.reward_workers
    num_digits = 1 if account.now - account.started_at < _LONG_RUN_S else 0
    yield "seconds of", "in all", "of CPU", "jobs", "$/h", "$", "joined", "lost"
    for name, line in [*lines.items()][:_MAX_ROWS]:
        seconds = (f"{one:,.{num_digits}f}" for one in (line.seconds, line.cpu_s))
        price = f"{line.price_usd_per_hour:,.2f}"
        yield name, *seconds, f"{line.num_jobs:,}", price, _usd(line.usd), str(line.num_joins), str(line.num_losses)


def _dollar_lines(account: Account) -> Iterator[str]:
    dollars = _dollars(account)
    total_usd = sum(dollars)
    if total_usd == 0.0:
        yield "dollars: none; all prices are 0"
        return
    price = account.config.trainer_usd_per_hour
    yield (
        f"dollars: ${_usd(total_usd)} = trainer ${_usd(dollars.trainer)} (at ${price:,.2f} an hour) "
        f"+ workers ${_usd(dollars.workers)}{f' + hosts ${_usd(dollars.hosts)}' if account.ledger.hosts else ''}"
        f"{f' + reward workers ${_usd(dollars.reward_workers)}' if account.ledger.reward_workers else ''}"
    )
    steps = [usd for _, usd in _by_step(account)]
    per_mtok = _per_mtok(account)
    if steps and per_mtok is not None:
        yield (
            f"${_usd(fmean(steps))} a step (from ${_usd(min(steps))} to ${_usd(max(steps))}); "
            f"${_usd(per_mtok)} a million answer tokens trained"
        )


def _usd(amount: float) -> str:
    """Cents where they can be seen, more digits below that."""
    return f"{amount:,.2f}" if amount >= 1 or amount == 0 else f"{amount:.4f}"


def _columns(rows: Sequence[TableRow], sides: str) -> str:
    """Rows under each other, `<` to the left and `>` to the right. Never cut: a wide table beats half a number."""
    widths = [max(len(cell) for cell in column) for column in zip(*rows, strict=True)]
    return "\n".join(
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=False)).rstrip()
        for row in rows
    )
