"""`polyrl status`: the members of the fleet, their work, and what each waits for."""

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from polyrl.cli import dialing

if TYPE_CHECKING:
    from rich.table import Table

    from polyrl.wire.control import EnvironmentStatus, RoundStatus, Status

EXAMPLE = """\
example:
  polyrl status --run-dir runs/first
  polyrl status --manager http://host:5000 --token-file admin.token --json"""

_WAITS_SHOWN = 12


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    dialing.add_arguments(parser)


def run(args: argparse.Namespace) -> int:
    import msgspec

    from polyrl.wire.control import Status

    status = dialing.run_with(args, lambda dialer: dialing.answer(dialer, "/v1/status", Status))
    if args.json:
        print(msgspec.json.encode(status).decode())
    else:
        _show(status)
    return 0


def _show(status: "Status") -> None:
    from rich.console import Console

    # Names that workers give themselves are text, whatever they look like: no markup.
    console = Console(highlight=False, markup=False, soft_wrap=True)
    paused = ", paused" if status.paused else ""
    run = "no run is open" if status.run == "none" else f"run open for {_span(status.now_s)}{paused}"
    version = "none published" if status.published < 0 else f"version {status.published}"
    console.print(f"{run}; {version}; trainer {status.trainer}; manager up {_span(status.uptime_s)}")
    if status.caveat:
        console.print(status.caveat)
    console.print(_workers(status) if status.workers else "no workers")
    if status.hosts:
        console.print(_hosts(status))
    for one in status.environments:
        console.print(_environment(one))
    if status.reward_workers:
        console.print(_reward_workers(status))
    for one in status.rounds:
        closed = ", closed" if one.closed else ""
        console.print(
            f"round {one.step} ({one.kind}, {_span(one.age_s)}{closed}): {one.groups_delivered} of {one.groups} groups "
            f"delivered; samples: {one.samples_waiting} waiting, {one.samples_running} running, "
            f"{one.samples_generated} generated{_episodes_of(one)}"
        )
    if status.ledger.get("episodes_begun"):
        console.print(_episodes(status.ledger))
    queues = ", ".join(f"{name.replace('_', ' ')} {number}" for name, number in status.queues.items() if number)
    if queues:
        console.print(f"queues: {queues}")
    for wait in status.waits[:_WAITS_SHOWN]:
        age = "" if wait.age_s is None else f"{_span(wait.age_s)} so far, "
        until = "as long as it takes" if wait.given_up_in_s is None else f"{max(0.0, wait.given_up_in_s):.1f} s more"
        console.print(f"waits for {wait.what} ({wait.of}): {age}{until}")
    if len(status.waits) > _WAITS_SHOWN:
        console.print(f"and {len(status.waits) - _WAITS_SHOWN} more; --json has all")
    if status.refused:
        console.print("refused: " + ", ".join(f"{name} {number}" for name, number in status.refused.items()))


def _workers(status: "Status") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("worker", "state", "engine", "version"):
        table.add_column(name)
    for name in ("running", "slots", "tokens/s", "$/h", "heard"):
        table.add_column(name, justify="right")
    for one in status.workers:
        state = one.state if one.connected else f"{one.state}, away"
        version = "-" if one.version < 0 else str(one.version)
        price = f"{one.price_usd_per_hour:.2f}{' spot' if one.spot else ''}"
        table.add_row(
            one.name, state, one.engine, version, str(one.running), str(one.slots), f"{one.tokens_per_s:,.0f}", price,
            f"{one.last_heard_s:.1f} s",
        )  # fmt: skip
    return table


def _hosts(status: "Status") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("host", "state", "environment"):
        table.add_column(name)
    for name in ("playing", "slots", "$/h", "$", "heard"):
        table.add_column(name, justify="right")
    for one in status.hosts:
        state = "draining" if one.draining else "playing" if one.playing else "ready"
        table.add_row(
            one.name, state if one.connected else f"{state}, away", one.environment, str(one.playing), str(one.slots),
            f"{one.price_usd_per_hour:.2f}", f"{one.usd:.4f}", f"{one.last_heard_s:.1f} s",
        )  # fmt: skip
    return table


def _environment(one: "EnvironmentStatus") -> str:
    waiting = f", {one.waiting} episodes wait for one" if one.waiting else ""
    if one.turn_p50_s is None or one.turn_p99_s is None:
        turns = "no turn has ended"
    else:
        turns = f"half of the turns within {one.turn_p50_s:.2g} s, 99 of 100 within {one.turn_p99_s:.2g} s"
    return (
        f"environment {one.name}: {one.playing} of {one.places} places taken{waiting}; {turns}; "
        f"one is given up after {one.turn_limit_s:g} s, an episode after {one.episode_limit_s:g} s of turns"
    )


def _reward_workers(status: "Status") -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in ("reward worker", "state"):
        table.add_column(name)
    for name in ("busy", "places", "scored", "failed", "heard"):
        table.add_column(name, justify="right")
    for one in status.reward_workers:
        state = one.state if one.connected else f"{one.state}, away"
        numbers = (one.running, one.places, one.scored, one.failed)
        table.add_row(one.name, state, *map(str, numbers), f"{one.last_heard_s:.1f} s")
    return table


def _episodes_of(one: "RoundStatus") -> str:
    if not one.episodes_unhosted and not one.episodes_playing:
        return ""
    return f"; episodes: {one.episodes_unhosted} without a host, {one.episodes_playing} with their environment"


def _episodes(ledger: Mapping[str, Any]) -> str:
    ended = ", ".join(f"{num} {outcome.replace('_', ' ')}" for outcome, num in ledger["episodes_ended"].items())
    usd = f", ${ledger['host_usd']:.4f}" if ledger["host_usd"] else ""
    return (
        f"episodes: {ledger['episodes_begun']} begun, {ended or 'none ended'}; {ledger['calls']} calls; "
        f"hosts: {_span(ledger['host_seconds'])}{usd}"
    )


def _span(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
