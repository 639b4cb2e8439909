"""The findings of `diagnose` about single workers: those that do not write, were turned away, or were refused
(diagnosis.py)."""

from collections.abc import Iterator

from polyrl.run.findings import Finding, count, left, wait_of
from polyrl.telemetry.looks import show_seconds
from polyrl.wire.control import Status, WorkerStatus


def of_workers(earlier: Status, now: Status) -> Iterator[Finding]:
    before = {one.name: one for one in earlier.workers}
    for worker in now.workers:
        finding = _of_worker(now, worker, before.get(worker.name))
        if finding is not None:
            yield finding


def _of_worker(now: Status, worker: WorkerStatus, before: WorkerStatus | None) -> Finding | None:
    name, holds = worker.name, count(worker.running, "sample")
    if not worker.connected:
        wait = wait_of(now, "heartbeat", name)
        soon = "it is given up" if wait is None else f"in {left(wait)} it is given up"
        return Finding(
            f"{name} is away: nothing was heard of it for {show_seconds(worker.last_heard_s)}",
            f"{soon}, and what it ran ({holds}) goes on elsewhere; it may join again at any time",
            "see whether its machine and the network to it are there, and whether its process runs",
        )
    if worker.state == "down":
        return Finding(
            f"{name}'s engine is down",
            "the worker starts it again; its samples go on elsewhere meanwhile",
            "if it happens again, its log says why; too little memory is usual",
        )
    if worker.state == "draining":
        wait = wait_of(now, "drain", name)
        until = "" if wait is None else f", in {left(wait)} at the latest"
        return Finding(
            f"{name} hands its {holds} over",
            f"then it leaves{until}",
            "end its process if it takes too long: what it has not handed over goes on elsewhere",
        )
    if worker.state in ("pulling", "waiting"):
        return _of_weights(now, worker)
    wait = wait_of(now, "switch", name)
    if wait is not None:
        return Finding(
            f"{name}'s devices change hands ({worker.duty.replace('_', ' ')})", f"in {left(wait)} at the latest"
        )
    if before is None or not worker.running or _written(worker) != _written(before):
        return None
    if now.trainer == "away":
        then = "no worker is blamed for that while the trainer is away: its prompts may be missing"
        return Finding(f"{name} has {holds} and wrote nothing while it was looked at", then)
    wait = wait_of(now, "stall", name)
    do = f"see its log and the load of its machine; or drain it: polyrl drain {name}"
    look = "" if wait is None else f"the manager looks in {left(wait)}: "
    return Finding(
        f"{name} has {holds} and wrote nothing while it was looked at",
        f"{look}what has no new token from one look to the next goes on elsewhere",
        do,
    )


def _of_weights(now: Status, worker: WorkerStatus) -> Finding | None:
    """Return the finding for a worker that has not the version it needs."""
    name = worker.name
    if worker.state == "pulling":
        wait = wait_of(now, "pull", name)
        since = "" if wait is None or wait.age_s is None else f", for {show_seconds(wait.age_s)}"
        until = "" if wait is None else f"; given up in {left(wait)}, and tried again"
        return Finding(
            f"{name} pulls version {worker.pulling} from {worker.source or 'the trainer'}{since}",
            f"then it writes{until}",
            "if that takes long, check the link between them; docs/concepts/weights.md#weight-transfer says what helps",
        )
    wait = wait_of(now, "retry_pull", name)
    if wait is not None:
        return Finding(
            f"{name} could not pull version {now.published}",
            f"it tries again in {left(wait)}",
            "see its log, and whether it can reach the ports of weights (weights.interfaces, weights.port)",
        )
    if now.published < 0:  # so do all
        return None
    return Finding(
        f"{name} waits for weights",
        "it pulls as soon as a source has room to send",
        "workers that others can reach pass weights on: see --relay-on of polyrl worker",
    )


def of_turned_away(now: Status) -> Iterator[Finding]:
    here = {one.name for one in (*now.workers, *now.reward_workers)}
    for one in now.turned_away:
        if one.name not in here:  # mended, and joined again
            yield Finding(
                f"{one.name} is gone since {show_seconds(one.ago_s)}: {one.why}",
                "nothing: it was told so, and ended",
                "start it as the command says with which workers join this run",
            )


_WHY_REFUSED = {
    "token": (
        "requests without a token that this run knows",
        "start workers with --token-file and the run's worker.token, hosts with host.token",
    ),
    "scope": (
        "requests with a token for less",
        "the admin token may do everything; the others do one thing each",
    ),
    "join_rate": (
        "joins, too many in a moment from one address",
        "something there starts workers that end at once: see their logs",
    ),
    "version": (
        "tokens of versions that were never offered",
        "the worker that wrote them has other weights: see its log, and start it anew",
    ),
    "result": ("results of reward workers that cannot be, or did not come", "see the logs of reward workers"),
    "digest": ("versions that are not what the trainer published", "start the worker that has them anew"),
}
"""The text for each kind of refusal, and the advice."""


def of_refusals(now: Status) -> Iterator[Finding]:
    for kind, (what, do) in _WHY_REFUSED.items():
        number = now.refused.get(kind, 0)
        if number:
            yield Finding(f"refused since the manager started: {number:,} {what}", "each was told so", do)


def _written(worker: WorkerStatus) -> tuple[int, int, int]:
    return worker.running, worker.tokens_running, worker.newest_lease
