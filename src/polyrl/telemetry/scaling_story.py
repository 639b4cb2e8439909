"""Why a run's fleet grew and shrank: every decision of its autoscaler, or its advice, told again from the journal.

The journal holds events, and decisions follow from them: they are made again here, each compared with the digest that
the journal has of it, so that what is told is what was decided.
"""

from collections.abc import Iterator

from polyrl.errors import JournalError
from polyrl.journal.files import open_journals
from polyrl.journal.records import digest_commands, resume_scheduler
from polyrl.scheduling.core.commands import AdviseFleet
from polyrl.scheduling.core.events import SupplyOffered
from polyrl.scheduling.scheduler import Scheduler
from polyrl.telemetry.looks import show_seconds


def explain(place: str) -> Iterator[str]:
    """Yield a line for each decision, and for each change of the supply that it was told of. Raises JournalError."""
    scheduler: Scheduler | None = None
    num, began_at = 0, None
    for header, records in open_journals(place):
        scheduler = resume_scheduler(header, scheduler)
        for record in records:
            commands = scheduler.handle(record.event, record.now)
            began_at = record.now if began_at is None else began_at
            at = show_seconds(record.now - began_at)
            if digest_commands(commands) != record.commands_digest:
                raise JournalError(f"{place}: record {record.number}: this version of PolyRL decides otherwise")
            if isinstance(record.event, SupplyOffered):
                offer = record.event
                yield f"{at:>9}  offered: {offer.num_workers} workers at ${offer.usd_per_hour:.2f} an hour each"
            for command in commands:
                if isinstance(command, AdviseFleet):
                    num += 1
                    yield f"{at:>9}  {_show(command)}"
    if num == 0:
        yield "no decision: nothing asked for another number of workers, for as many steps as scaling.num_steps says"


def _show(command: AdviseFleet) -> str:
    goes = f"; let go: {', '.join(command.let_go)}" if command.let_go else ""
    return f"{command.num_workers} workers: {command.why}{goes}"
