"""The offers of a market of machines over time: a CSV file `at_s,workers[,usd_per_hour]`.

    at_s,workers,usd_per_hour
    0,4,5.32
    600,2,9.80          from the 600th second on two workers are to be had, at another price

The simulator plays such files, and so does the provider `local`.
"""

import csv
from math import isfinite
from pathlib import Path

from msgspec import Struct

from polyrl.errors import ConfigError
from polyrl.scheduling.core.bounds import Count, NotNegative

_HEADER = ["at_s", "workers"]
_PRICED = [*_HEADER, "usd_per_hour"]


class SupplyEvent(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    at_s: NotNegative
    workers: Count
    """Remote workers that the market grants from this moment on."""
    usd_per_hour: NotNegative | None = None
    """The price of every remote worker from this moment on; none: as before, at first `fleet.price_usd_per_hour`."""


def read_supply_trace(path: Path | str) -> list[SupplyEvent]:
    """Read a CSV file `at_s,workers`. Raises ConfigError that names the file, the line and what is wrong."""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not a text file in UTF-8") from error
    rows = csv.reader(line for line in text.splitlines() if not line.startswith("#"))
    header = [cell.strip() for cell in next(rows, [])]
    if header not in (_HEADER, _PRICED):
        raise ConfigError(f"{path}:1: expected the header {','.join(_HEADER)} or {','.join(_PRICED)}")
    events: list[SupplyEvent] = []
    for row in rows:
        if not row:
            continue
        event = _trace_event(row, header, f"{path}:{rows.line_num}")
        if events and event.at_s < events[-1].at_s:
            raise ConfigError(
                f"{path}:{rows.line_num}: at_s {event.at_s:g} comes before {events[-1].at_s:g}; expected order"
            )
        events.append(event)
    if not events:
        raise ConfigError(f"{path}: has no rows; expected lines of {','.join(_HEADER)}")
    return events


def _trace_event(row: list[str], header: list[str], where: str) -> SupplyEvent:
    if len(row) != len(header):
        raise ConfigError(f"{where}: expected {len(header)} values ({','.join(header)}), got {len(row)}")
    at_s = _number(row[0], float, f"{where}: at_s", "a number of seconds, 0 or more")
    workers = _number(row[1], int, f"{where}: workers", "a whole number, 0 or more")
    price = None
    if header == _PRICED:
        price = _number(row[2], float, f"{where}: usd_per_hour", "dollars an hour, 0 or more")
    return SupplyEvent(at_s=at_s, workers=int(workers), usd_per_hour=price)


def _number(cell: str, kind: type[float] | type[int], where: str, expected: str) -> float:
    try:
        value = kind(cell)
    except ValueError as error:
        raise ConfigError(f"{where}: {cell!r} is not a number; expected {expected}") from error
    if value < 0 or not isfinite(value):
        raise ConfigError(f"{where}: {cell!r} is out of range; expected {expected}")
    return value
