"""A run's timeline in the Trace Event Format, which Perfetto and chrome://tracing open.

Each worker, host and the trainer is a process of the trace, with its activities; samples lie on their worker's process
as asynchronous slices, since many run at once.
"""

import json
from collections.abc import Iterator, Sequence
from typing import Any, TextIO

from polyrl.dashboard.following import TimelineRow

_US = 1e6


def write_trace(rows: Sequence[TimelineRow], file: TextIO) -> int:
    """Write the trace, an event a line, and return the number of events."""
    num = 0
    file.write('{"displayTimeUnit":"ms","traceEvents":[\n')
    for num, event in enumerate(_events(rows), start=1):
        file.write(("" if num == 1 else ",\n") + json.dumps(event, separators=(",", ":")))
    file.write("\n]}\n")
    return num


def _events(rows: Sequence[TimelineRow]) -> Iterator[dict[str, Any]]:
    for pid, row in enumerate(rows, start=1):
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"{row.name} ({row.kind})"}}
        yield {"ph": "M", "name": "process_sort_index", "pid": pid, "args": {"sort_index": pid}}
        yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": 1, "args": {"name": "activity"}}
        for start, end, activity in row.spans:
            yield {"ph": "X", "name": activity, "pid": pid, "tid": 1, "ts": start * _US, "dur": (end - start) * _US}
        for at, how, why in row.ends:
            yield {"ph": "i", "name": how, "pid": pid, "tid": 1, "ts": at * _US, "s": "p", "args": {"why": why}}
        last = max((end for _, end, _ in row.spans), default=0.0)
        for number, lease in enumerate(row.leases):
            same = {"cat": "samples", "name": f"sample {lease.sample}", "id": f"{pid}.{number}", "pid": pid, "tid": 1}
            facts = {"tokens": lease.num_tokens, "ending": lease.ending or "still there"}
            yield {"ph": "b", **same, "ts": lease.start_s * _US, "args": facts}
            yield {"ph": "e", **same, "ts": (last if lease.end_s is None else lease.end_s) * _US}
