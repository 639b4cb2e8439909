"""The manager's status as metrics for Prometheus."""

from collections import Counter
from collections.abc import Iterator, Sequence

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import Collector, CollectorRegistry

from polyrl.manager.lobby import Lobby
from polyrl.manager.status import status
from polyrl.wire.control import HostStatus, Status, WorkerStatus


class _Metrics(Collector):
    def __init__(self, lobby: Lobby, uptime_s: float) -> None:
        self._lobby = lobby
        self._status = status(lobby, uptime_s)

    def collect(self) -> Iterator[Metric]:
        now, run = self._status, self._lobby.run
        num_bytes = 0 if run is None else run.payload.num_bytes
        yield GaugeMetricFamily("polyrl_uptime_seconds", "Since the manager started.", now.uptime_s)
        yield CounterMetricFamily("polyrl_tokens_received", "Tokens since the manager started.", now.tokens_received)
        yield CounterMetricFamily("polyrl_frames_received", "Frames since the manager started.", self._lobby.num_frames)
        yield GaugeMetricFamily("polyrl_payload_bytes", "Tokens held in memory.", num_bytes)
        yield GaugeMetricFamily("polyrl_published_version", "The newest version; -1 is none.", now.published)
        caveats = {now.caveat: 1} if now.caveat else {}
        yield _by("polyrl_caveat", "What no number here is to be read without.", "caveat", caveats)
        yield _by("polyrl_queue", "Lengths of queues.", "queue", now.queues)
        yield _by("polyrl_workers", "Workers by state.", "state", Counter(worker.state for worker in now.workers))
        yield from _of_workers(now)
        yield from _drafts(now.workers)
        yield _by("polyrl_hosts", "Hosts by state.", "state", Counter(_state(one) for one in now.hosts))
        yield _by("polyrl_host_playing", "Episodes of each host.", "host", {one.name: one.playing for one in now.hosts})
        yield from _of_rounds(now)
        states = Counter(one.state for one in now.reward_workers)
        yield _by("polyrl_reward_workers", "Reward workers by state.", "state", states)
        yield _by("polyrl_refused", "What was refused.", "reason", now.refused)
        for key in ("tokens_arrived", "tokens_kept", "samples_started", "samples_trained", "prompts_trained", "usd"):
            if key in now.ledger:
                yield GaugeMetricFamily(f"polyrl_ledger_{key}", "From the ledger.", now.ledger[key])
        discarded = now.ledger.get("tokens_discarded", {})
        yield _by("polyrl_ledger_tokens_discarded", "Tokens thrown away, by cause.", "cause", discarded)


def _of_workers(now: Status) -> Iterator[Metric]:
    figures = {
        "tokens_per_second": "As each worker says.",
        "running": "Samples of each worker.",
        "kv_used": "Share of its KV cache.",
        "version": "The version that it runs; -1 is none.",
        "price_usd_per_hour": "As it said when it joined.",
        "silent_seconds": "Since anything came from it.",
    }
    fields = {"tokens_per_second": "tokens_per_s", "silent_seconds": "last_heard_s"}
    for figure, text in figures.items():
        values = {worker.name: getattr(worker, fields.get(figure, figure)) for worker in now.workers}
        yield _by(f"polyrl_worker_{figure}", text, "worker", values)


def _of_rounds(now: Status) -> Iterator[Metric]:
    """Yield what the trainer does, the oldest open round, and the oldest wait of each kind."""
    does = {now.trainer_does or now.trainer: 1}
    yield _by("polyrl_trainer", "1 for what it does: waits, trains, validates, attached, away, none.", "does", does)
    if now.rounds:
        first = now.rounds[0]
        yield GaugeMetricFamily("polyrl_round_step", "Step of the oldest open round.", first.step)
        yield GaugeMetricFamily("polyrl_round_age_seconds", "Since it was opened.", first.age_s)
        groups = {"wanted": first.groups, "generated": first.groups_generated, "delivered": first.groups_delivered}
        yield _by("polyrl_round_groups", "Its groups.", "state", groups)
        yield GaugeMetricFamily("polyrl_round_longest_tokens", "Of its running samples.", first.longest_tokens)
    ages: dict[str, float] = {}
    for wait in now.waits:
        ages[wait.what] = max(ages.get(wait.what, 0.0), wait.age_s or 0.0)
    yield _by("polyrl_wait_seconds", "The oldest wait of each kind.", "what", ages)


def _state(host: HostStatus) -> str:
    return "draining" if host.draining else "connected" if host.connected else "away"


def _drafts(workers: Sequence[WorkerStatus]) -> Iterator[Metric]:
    """Yield what became of the drafts of each worker's engine; it counts anew when it starts again."""
    rounds = {one.name: one.draft_rounds for one in workers}
    drafted = {one.name: one.tokens_drafted for one in workers}
    accepted = {one.name: one.tokens_accepted for one in workers}
    yield _by("polyrl_worker_draft_rounds", "Steps that verified drafts, as each worker says.", "worker", rounds)
    yield _by("polyrl_worker_drafted_tokens", "Tokens of drafts that were verified.", "worker", drafted)
    yield _by("polyrl_worker_accepted_tokens", "Drafted tokens that stood.", "worker", accepted)


def _by(name: str, text: str, label: str, values: dict[str, int] | dict[str, float]) -> Metric:
    family = GaugeMetricFamily(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family


def metrics(lobby: Lobby, uptime_s: float) -> bytes:
    """Return the metrics in Prometheus' text format."""
    registry = CollectorRegistry()
    registry.register(_Metrics(lobby, uptime_s))
    return generate_latest(registry)
