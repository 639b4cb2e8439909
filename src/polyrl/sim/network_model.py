"""Weights on the wire: transfers as flows that share what leaves a node and what enters one.

Rules it keeps:
- A flow's rate is min(egress of its source / flows out of it, ingress of its sink / flows into it), in force from one
  change to the next. This is not max-min fairness: what one flow cannot use, its neighbours do not get, so the model
  never promises more than the network has.
- A region's nodes share a link to all others, each way; a flow within a region does not use it.
- A peer may serve what it is still receiving; its flows out are then no faster than its flows in, all together. Flows
  that feed each other in a circle are not held to this: they would wait for each other for ever.
- What finishes at `now` has finished before anything else happens at `now`. Flows that finish together are told in the
  order of their start.

It leaves out latency, loss, parallel streams, other traffic, and which chunks a peer holds.
"""

from collections import Counter
from math import inf

from msgspec import Struct

from polyrl.ids import Seconds

_BYTES_PER_GBIT = 1e9 / 8
_SAME_MOMENT_S = 1e-9


class _Node(Struct):
    egress: float  # bytes a second
    ingress: float
    sent_by_ended: float = 0.0
    region: str = ""


class _Flow(Struct):
    flow_id: int
    source: str
    sink: str
    num_bytes: float
    remaining: float  # as of `since`
    since: Seconds
    rate: float = 0.0
    finish_at: Seconds = inf


class NetworkModel:
    """The nodes and the flows between them. Call `advance(now)` to collect what finished."""

    def __init__(self) -> None:
        self._nodes: dict[str, _Node] = {}
        self._links: dict[str, float] = {}  # bytes a second, by region
        self._flows: dict[int, _Flow] = {}  # in order of their start
        self._finished: list[tuple[int, Seconds]] = []
        self._now: Seconds = 0.0
        self._rates_are_known = True
        self._next_at: Seconds | None = None

    def set_link(self, region: str, gbps: float) -> None:
        """Limit what all flows into a region carry together, and all flows out of it."""
        self._links[region] = gbps * _BYTES_PER_GBIT

    def set_node(self, name: str, egress_gbps: float, ingress_gbps: float, region: str = "") -> None:
        """Make a node known, or change its capacity from the next change of flows on."""
        if egress_gbps <= 0 or ingress_gbps <= 0:
            raise ValueError(f"node {name}: capacities must be above 0, got {egress_gbps} out and {ingress_gbps} in")
        sent = self._nodes[name].sent_by_ended if name in self._nodes else 0.0
        self._nodes[name] = _Node(egress_gbps * _BYTES_PER_GBIT, ingress_gbps * _BYTES_PER_GBIT, sent, region)

    def start(self, flow_id: int, now: Seconds, source: str, sink: str, num_bytes: float) -> None:
        if flow_id in self._flows:
            raise ValueError(f"flow {flow_id} started twice")
        for name in (source, sink):
            if name not in self._nodes:
                raise ValueError(f"flow {flow_id}: node {name!r} is unknown; call set_node first")
        self._settle_before_change(now)
        self._flows[flow_id] = _Flow(flow_id, source, sink, num_bytes, num_bytes, now)
        self._rates_are_known = False

    def cancel(self, flow_id: int, now: Seconds) -> float | None:
        """End a flow early and say how many bytes it had sent; none when it is not here (unknown, or finished)."""
        self._settle_before_change(now)
        flow = self._flows.pop(flow_id, None)
        if flow is None:
            return None
        self._rates_are_known = False
        sent = _sent_by(flow, now)
        self._nodes[flow.source].sent_by_ended += sent
        return sent

    def advance(self, now: Seconds) -> list[tuple[int, Seconds]]:
        """Return `(flow_id, at)` of the flows that finished up to `now` and were not yet told, in order."""
        self._settle(now)
        finished, self._finished = self._finished, []
        return finished

    def next_change(self) -> Seconds | None:
        """Return when the next flow finishes if none is started or cancelled; none while nothing flows."""
        if not self._rates_are_known:
            self._set_rates()
        return self._next_at

    def rate_gbps(self, flow_id: int) -> float:
        """Return the present rate of a flow; 0 when it is not here."""
        self.next_change()
        flow = self._flows.get(flow_id)
        return 0.0 if flow is None else flow.rate / _BYTES_PER_GBIT

    def sent_bytes(self, source: str) -> float:
        """Bytes that left a node up to the latest `now` told, those of cancelled flows included."""
        under_way = sum(_sent_by(flow, self._now) for flow in self._flows.values() if flow.source == source)
        return self._nodes[source].sent_by_ended + under_way

    def _settle_before_change(self, now: Seconds) -> None:
        # Many flows start at one moment, when a version is published: their rates are found once, when time goes on.
        if self._rates_are_known or now > self._now:
            self._settle(now)

    def _settle(self, now: Seconds) -> None:
        while (at := self.next_change()) is not None and at <= now:
            self._finish_at(at)
        self._now = max(self._now, now)

    def _finish_at(self, at: Seconds) -> None:
        self._now = at
        done = [flow for flow in self._flows.values() if flow.finish_at <= at + _SAME_MOMENT_S]
        for flow in done:
            del self._flows[flow.flow_id]
            self._nodes[flow.source].sent_by_ended += flow.num_bytes
            self._finished.append((flow.flow_id, at))
        self._rates_are_known = False

    def _set_rates(self) -> None:
        """Give every flow its rate from the latest change on. While a rate stays, its finish stays to the last bit."""
        self._rates_are_known = True
        now = self._now
        rates = _held_to_their_feed(self._flows, self._fair_rates())
        self._next_at = None
        for flow_id, flow in self._flows.items():
            rate = rates[flow_id]
            if rate != flow.rate:
                flow.remaining = max(0.0, flow.remaining - flow.rate * (now - flow.since))
                flow.since = now
                flow.rate = rate
                flow.finish_at = now + flow.remaining / rate
            if self._next_at is None or flow.finish_at < self._next_at:
                self._next_at = flow.finish_at

    def _fair_rates(self) -> dict[int, float]:
        num_out = Counter(flow.source for flow in self._flows.values())
        num_in = Counter(flow.sink for flow in self._flows.values())
        crossing = Counter(link for flow in self._flows.values() for link in self._links_of(flow))
        nodes, links = self._nodes, self._links
        return {
            flow_id: min(
                nodes[flow.source].egress / num_out[flow.source],
                nodes[flow.sink].ingress / num_in[flow.sink],
                *(links.get(link[0], inf) / crossing[link] for link in self._links_of(flow)),
            )
            for flow_id, flow in self._flows.items()
        }

    def _links_of(self, flow: _Flow) -> list[tuple[str, str]]:
        """Return the links that a flow uses, each with its direction."""
        here, there = self._nodes[flow.source].region, self._nodes[flow.sink].region
        return [] if here == there else [(here, "out"), (there, "in")]


def _held_to_their_feed(flows: dict[int, _Flow], fair_rates: dict[int, float]) -> dict[int, float]:
    """Rates with the flows out of a node that still receives held to what flows into it, from the origins downwards."""
    out_of: dict[str, list[_Flow]] = {}
    num_unknown_in: dict[str, int] = {}
    for flow in flows.values():
        out_of.setdefault(flow.source, []).append(flow)
        num_unknown_in[flow.sink] = num_unknown_in.get(flow.sink, 0) + 1
    fed: dict[str, float] = {}
    rates = dict(fair_rates)
    ready = [node for node in out_of if node not in num_unknown_in]
    while ready:
        node = ready.pop()
        for flow in out_of.get(node, ()):
            rate = min(rates[flow.flow_id], fed.get(node, inf))
            rates[flow.flow_id] = rate
            fed[flow.sink] = fed.get(flow.sink, 0.0) + rate
            num_unknown_in[flow.sink] -= 1
            if num_unknown_in[flow.sink] == 0:
                ready.append(flow.sink)
    return rates


def _sent_by(flow: _Flow, now: Seconds) -> float:
    left = max(0.0, flow.remaining - flow.rate * max(0.0, now - flow.since))
    return flow.num_bytes - left
