"""The figures of a run: each against the simulation that it came from, and against the others."""

import json
from itertools import pairwise
from statistics import fmean

import msgspec
import pytest
from tests.unit.tiny import play_tiny

from polyrl.sim.result import measure_steps, percentile, to_json
from polyrl.telemetry.timeline import Span, seconds_by_activity

KEYS_ASKED_FOR = {
    "scenario": None,
    "seed": None,
    "steps": None,
    "step_time_s": {"mean", "p50", "p95", "short_mean", "long_mean"},
    "throughput_tok_s": None,
    "tokens": {"generated", "trained", "discarded"},
    "length": {"trained_mean", "generated_mean"},
    "cost": {"usd", "usd_per_mtok"},
    "workers": {"mean", "joins", "losses"},
    "migrations": None,
    "seed_window_s": None,
    "events": None,
    "events_per_s": None,
    "law_violations": None,
}


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="module")
def raced(tmp_path_factory):
    return play_tiny(tmp_path_factory.mktemp("tiny"), "rounds.tail_batching=race", "run.steps=10")


def test_the_json_has_every_key_that_was_promised(played):
    tree = json.loads(to_json(played[1]))
    for key, inner in KEYS_ASKED_FOR.items():
        assert key in tree
        assert inner is None or inner <= set(tree[key])


def test_step_times_are_the_gaps_between_ends_of_steps_without_the_warm_up(played):
    sim, result = played
    ends = [line.trained_at for line in sim.lines]
    gaps = [after - before for before, after in pairwise(ends)]
    assert result.warmup_steps == 1
    assert result.step_time_s.mean == pytest.approx(fmean(gaps))
    assert result.step_time_s.long_mean is None


def test_throughput_and_dollars_are_of_the_measured_steps(played):
    sim, result = played
    seconds = sim.lines[-1].trained_at - sim.lines[0].trained_at
    tokens = sim.tokens_at_step[-1] - sim.tokens_at_step[0]
    usd = sim.lines[-1].usd - sim.lines[0].usd
    assert result.throughput_tok_s == pytest.approx(tokens / seconds)
    assert result.cost.usd == pytest.approx(usd)
    assert result.cost.usd == pytest.approx(result.cost.trainer_usd + result.cost.workers_usd)
    assert result.cost.usd_per_mtok == pytest.approx(usd / tokens * 1e6)
    assert result.cost.tok_per_usd == pytest.approx(tokens / usd)


def test_every_token_is_trained_discarded_or_open(raced):
    tokens = raced[1].tokens
    assert tokens.generated == tokens.trained + sum(tokens.discarded.values()) + tokens.open
    assert tokens.discarded["speculation"] > 0
    assert tokens.open >= 0


def test_a_race_has_short_and_long_rounds_and_trains_shorter_answers(raced):
    result = raced[1]
    assert result.rounds == {"short": 8, "long": 2}
    assert result.step_time_s.short_mean is not None
    assert result.step_time_s.long_mean is not None
    assert result.length.bias < 1.0
    assert result.length.bias == pytest.approx(result.length.trained_mean / result.length.natural_mean)
    assert result.length.natural_mean < result.length.generated_mean, "deferred prompts, the long ones, start twice"


def test_without_a_race_what_is_trained_is_as_long_as_what_is_generated(played):
    assert played[1].length.bias == pytest.approx(1.0)


def test_shares_are_shares(played, raced):
    for _, result in (played, raced):
        assert 0.0 <= result.idle.trainer_waiting <= 1.0
        assert result.idle.fleet_idle is not None
        assert 0.0 <= result.idle.fleet_idle <= 1.0


def test_a_run_without_workers_has_no_idle_fleet(tmp_path):
    _, result = play_tiny(tmp_path, "fleet.workers=0")
    assert result.idle.fleet_idle is None
    assert result.cost.workers_usd == pytest.approx(0.0)
    assert (result.workers.mean, result.workers.joins, result.workers.losses) == (0.0, 0, 0)


def test_a_run_without_prices_costs_nothing_and_divides_by_nothing(tmp_path):
    _, result = play_tiny(tmp_path, "trainer.price_usd_per_hour=0", "fleet.price_usd_per_hour=0")
    assert result.cost.usd == 0.0
    assert result.cost.tok_per_usd is None


def test_a_warm_up_as_long_as_the_run_leaves_half_of_it(tmp_path):
    _, result = play_tiny(tmp_path, "run.warmup_steps=12")
    assert (result.steps, result.warmup_steps) == (4, 2)


def test_only_the_speed_of_this_machine_differs_between_two_runs(tmp_path):
    (_, one), (_, two) = play_tiny(tmp_path), play_tiny(tmp_path)
    assert msgspec.structs.replace(one, events_per_s=0.0) == msgspec.structs.replace(two, events_per_s=0.0)
    assert play_tiny(tmp_path, seed=1)[1].journal_digest != one.journal_digest


def test_steps_add_up_to_the_run(played):
    sim, _ = played
    steps = measure_steps(sim)
    assert sum(step.step_s for step in steps) == pytest.approx(sim.lines[-1].trained_at)
    assert sum(step.tokens for step in steps) == sim.tokens_at_step[-1]
    assert sum(step.usd for step in steps) == pytest.approx(sim.lines[-1].usd)


def test_percentiles_lie_between_two_values():
    assert percentile([3.0], 0.95) == 3.0
    assert percentile([4.0, 1.0, 2.0, 3.0], 0.5) == pytest.approx(2.5)
    assert percentile([1.0, 2.0], 1.0) == 2.0


def test_seconds_by_activity_are_cut_at_the_window():
    spans = [Span(0.0, 4.0, "generating"), Span(4.0, 6.0, "idle"), Span(6.0, 9.0, "generating")]
    assert seconds_by_activity(spans, 3.0, 7.0) == {"generating": 2.0, "idle": 2.0}


def test_training_time_on_devices_that_nobody_timed_is_said_to_be_assumed(played, tmp_path):
    assert played[1].assumed == []
    _, result = play_tiny(tmp_path, "trainer.num_devices=16", "trainer.timed_devices=4", "trainer.scaling=0.5")
    (said,) = result.assumed
    assert said.startswith("16 devices train a token 2.00 times as fast as the 4 that were timed")
    assert "trainer.scaling = 0.5 is yours to measure" in said


def test_more_devices_train_tokens_faster_and_the_optimizer_takes_as_long(tmp_path):
    def played_on(num_devices: int) -> tuple[float, float]:
        alone = ("run.mode=synchronous", "fleet.workers=0", "trainer.local_workers=4", "trainer.timed_devices=4")
        costs = ("trainer.optimizer_s=100", "trainer.micro_batch_fixed_s=0", f"trainer.num_devices={num_devices}")
        sim, _ = play_tiny(tmp_path, *alone, *costs, "engine.tp_exponent=0")
        last = measure_steps(sim)[-1]
        return last.line.train_s, last.step_s

    (few_train_s, few_s), (many_train_s, many_s) = played_on(4), played_on(8)
    assert many_train_s == pytest.approx(few_train_s / 2)
    assert few_s - many_s == pytest.approx(few_train_s / 2)
