"""Drafts of the run's engines in a step's metrics: differences, over restarts, each told once."""

from typing import Any

from polyrl.run.draft_counts import DraftCounts
from polyrl.telemetry.metric_names import describe
from polyrl.wire.control import WorkerStatus


def worker(name: str, rounds: int, drafted: int, accepted: int) -> WorkerStatus:
    facts: dict[str, Any] = dict.fromkeys(("version", "running", "slots", "engine_waiting"), 0)
    facts |= dict.fromkeys(("kv_used", "tokens_per_s", "price_usd_per_hour", "last_heard_s", "usd"), 0.0)
    facts |= {"state": "active", "connected": True, "engine": "builtin", "model": "tiny", "spot": False}
    return WorkerStatus(name=name, draft_rounds=rounds, tokens_drafted=drafted, tokens_accepted=accepted, **facts)


def test_a_step_has_what_was_heard_since_the_last_one():
    counts = DraftCounts()
    counts.hear([worker("a", 0, 0, 0)])
    assert counts.take() == {}, "no engine has verified a draft"
    counts.hear([worker("a", 10, 50, 20), worker("b", 1, 7, 7)])
    counts.hear([worker("a", 12, 60, 25)])
    assert counts.take() == {"fleet/draft_rounds": 13, "fleet/drafted_tokens": 67, "fleet/accepted_tokens": 32}
    assert counts.take() == {"fleet/draft_rounds": 0, "fleet/drafted_tokens": 0, "fleet/accepted_tokens": 0}
    counts.hear([worker("a", 3, 9, 4)])
    told = counts.take()
    assert told == {"fleet/draft_rounds": 3, "fleet/drafted_tokens": 9, "fleet/accepted_tokens": 4}, "it started again"
    assert all(describe(name) for name in told)
