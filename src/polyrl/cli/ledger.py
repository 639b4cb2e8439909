"""`polyrl ledger`: what became of every prompt, sample, token, second and dollar of a run, from its journal alone.

Rules: the table shows sums that hold, with what is still open beside what is decided. Exit code 1 means that we are
wrong: a law does not hold, or this version decides otherwise than the one that wrote the journal.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polyrl.telemetry.account import Account

EXIT_OK = 0
EXIT_WRONG = 1

EXAMPLE = """\
examples:
  polyrl ledger run
  polyrl ledger run --verify
  polyrl ledger out/spot --json

RUN is the directory of a run, live, ended or killed, or a journal. --verify runs the journal through the scheduler
again, checks every conservation law on the way, and holds seconds and dollars against wall clock times price.
Exit code 0: all is well. 1: a law is broken, and which; or this version decides otherwise than the journal, and where.
2: there is no run, or its journal is damaged."""

ACTIVITIES = ("starting", "pulling", "generating", "idle", "draining", "training", "validating")
_MAX_ROWS = 40
_LONG_RUN_S = 1000.0
_SHOWN_S = 0.05
_MILLION = 1e6

TableRow = tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN", help="the directory of a run, or a journal")
    parser.add_argument("--verify", action="store_true", help="check every law along the way, and every sum at the end")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")


def run(args: argparse.Namespace) -> int:
    from polyrl.telemetry.account import read_account
    from polyrl.telemetry.reconcile import broken_sums

    account = read_account(args.run, verify=args.verify)
    broken = list(account.broken_laws)
    if args.verify and not broken and not account.difference:
        broken += broken_sums(account)
    if args.json:
        print(json.dumps(as_json(account, args.run, broken if args.verify else None)))
    else:
        _print(account, args.run, verified=args.verify and not broken and not account.difference)
    if account.difference:
        print(f"polyrl: difference: {account.difference}; what follows is not told", file=sys.stderr)
    for law in broken:
        print(f"polyrl: broken law: {law}", file=sys.stderr)
    return EXIT_WRONG if broken or account.difference else EXIT_OK


def as_json(account: "Account", name: str, broken: list[str] | None) -> dict[str, Any]:
    """Everything that the table shows, and every step. `broken_laws` is null when nobody looked for them."""
    ledger, still = account.ledger, account.open
    trainer_usd, workers_usd = _dollars(account)
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
        "usd": {
            "trainer": trainer_usd,
            "workers": workers_usd,
            "total": trainer_usd + workers_usd,
            "per_step": _per_step(account),
            "per_mtok": _per_mtok(account),
            "by_step": [{"step": step, "usd": usd} for step, usd in _by_step(account)],
        },
        "checks": account.num_checks,
        "broken_laws": broken,
    }


def _dollars(account: "Account") -> tuple[float, float]:
    return account.ledger.trainer_usd(account.now), sum(line.usd for line in account.ledger.workers.values())


def _by_step(account: "Account") -> list[tuple[int, float]]:
    """Dollars from the end of one step to the end of the next; of the first, since the run began."""
    before = [0.0 if account.is_whole or not account.lines else account.lines[0].usd]
    before += [line.usd for line in account.lines]
    return [(line.step, line.usd - usd) for line, usd in zip(account.lines, before, strict=False)]


def _per_step(account: "Account") -> float | None:
    steps = _by_step(account)
    return sum(usd for _, usd in steps) / len(steps) if steps else None


def _per_mtok(account: "Account") -> float | None:
    """All dollars, also those of what was thrown away, through the tokens that were trained."""
    kept = account.ledger.tokens_kept
    return sum(_dollars(account)) / kept * _MILLION if kept else None


# For a person


def _print(account: "Account", name: str, *, verified: bool) -> None:
    print(_title(account, name))
    if account.caveat:
        print(account.caveat)
    if account.cut_short:
        print(f"the journal ends inside a record, as a killed run leaves it: {account.cut_short}")
    print(_columns([*_counts(account)], "<><"))
    if account.ledger.workers:
        print(_columns([*_seconds(account)], "<" + ">" * 20))
        hidden = len(account.ledger.workers) - _MAX_ROWS
        if hidden > 0:
            print(f"... and {hidden} more workers; --json has all of them")
    for line in _dollar_lines(account):
        print(line)
    if verified:
        print(
            f"verified: {account.num_records:,} records gave the same commands, all laws held at "
            f"{account.num_checks:,} checks,\nseconds and dollars agree with wall clock times price"
        )


def _title(account: "Account", name: str) -> str:
    from polyrl.telemetry.looks import show_seconds

    num_steps = len(account.lines)
    rounds = ", ".join(f"{num} {kind}" for kind, num in account.ledger.rounds.items() if num)
    steps = f"{num_steps} step{'' if num_steps == 1 else 's'} trained"
    took = show_seconds(account.now - account.started_at)
    if account.trainer_gone_s >= _SHOWN_S:
        took += f", no trainer was there for {show_seconds(account.trainer_gone_s)} of it"
    return f"{name}: {steps} in {took}; rounds opened: {rounds or 'none'}"


def _counts(account: "Account") -> Iterator[TableRow]:
    from polyrl.telemetry.looks import CAUSES, MOVES

    ledger, still = account.ledger, account.open
    yield "prompts started", f"{ledger.prompts_started:,}", ""
    yield "  trained", f"{ledger.prompts_trained:,}", ""
    yield from _causes(ledger.prompts_dropped, "dropped: ", {})
    yield "  deferred", f"{still.deferred_prompts:,}", "wait for a long round"
    yield "  open", f"{still.prompts:,}", ""
    yield "samples started", f"{ledger.samples_started:,}", ""
    yield "  trained", f"{ledger.samples_trained:,}", ""
    if ledger.samples_answered:
        yield "  answered", f"{ledger.samples_answered:,}", "to whoever asked beside the trainer"
    yield from _causes(ledger.samples_discarded, "", CAUSES)
    yield "  open", f"{still.samples:,}", ""
    moves = ", ".join(f"{MOVES.get(cause, cause)} {num:,}" for cause, num in ledger.moves.items() if num)
    yield "samples moved", f"{sum(ledger.moves.values()):,}", moves
    yield "tokens arrived", f"{ledger.tokens_arrived:,}", ""
    yield "  kept", f"{ledger.tokens_kept:,}", "trained"
    if ledger.tokens_answered:
        yield "  answered", f"{ledger.tokens_answered:,}", "to whoever asked beside the trainer"
    yield from _causes(ledger.tokens_discarded, "", CAUSES)
    yield "  open", f"{still.tokens:,}", "of samples that are not decided"
    yield "prefilled again", f"{ledger.tokens_reprefilled:,}", "tokens, because a sample moved; not part of the sum"


def _causes(counts: Mapping[str, int], before: str, words: Mapping[str, str]) -> Iterator[TableRow]:
    for cause, num in sorted(counts.items(), key=lambda item: -item[1]):
        if num:
            yield f"  {before}{cause}", f"{num:,}", words.get(cause, "")


def _seconds(account: "Account") -> Iterator[TableRow]:
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


def _dollar_lines(account: "Account") -> Iterator[str]:
    trainer_usd, workers_usd = _dollars(account)
    if trainer_usd + workers_usd == 0.0:
        yield "dollars: none; all prices are 0"
        return
    price = account.config.trainer_usd_per_hour
    yield (
        f"dollars: ${_usd(trainer_usd + workers_usd)} = trainer ${_usd(trainer_usd)} (at ${price:,.2f} an hour) "
        f"+ workers ${_usd(workers_usd)}"
    )
    steps = [usd for _, usd in _by_step(account)]
    per_mtok = _per_mtok(account)
    if steps and per_mtok is not None:
        yield (
            f"${_usd(sum(steps) / len(steps))} a step (from ${_usd(min(steps))} to ${_usd(max(steps))}); "
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
