"""The parallelism planner, with the shape of Qwen3-8B on 8 devices of 80 GB."""

import math

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from polyrl.scheduling.rules.parallelism import (
    DecodeSpeed,
    LocalDevices,
    ModelShape,
    ParallelismConfig,
    ParallelismPlan,
    ParallelismState,
    PreemptionWatch,
    RoundKind,
    RoundProgress,
    RoundShape,
    capacity_tokens,
    kv_bytes_per_token,
    peak_tokens,
    plan,
    round_time_s,
    tensor_parallel_sizes,
)

QWEN_8B = ModelShape(
    num_layers=36,
    num_kv_heads=8,
    head_dim=128,
    dtype_bytes=2,
    weight_bytes=16_400_000_000,
    activation_bytes=4_000_000_000,
)
DEVICES = LocalDevices(num_devices=8, memory_bytes=80_000_000_000, fraction=0.85)
SPEED = DecodeSpeed(fixed_s=0.008, per_sample_s=2e-5, per_context_token_s=6e-8, tp_exponent=0.6)
SHORT = RoundShape(num_samples=1600, prompt_tokens=512, cap=8_192)
LONG = RoundShape(num_samples=1024, prompt_tokens=512, cap=32_768)


def log_normal(median: float, sigma: float):
    return lambda x: 1.0 if x <= 1 else 0.5 * math.erfc(math.log(x / median) / (sigma * math.sqrt(2)))


def all_of_length(length: int):
    return lambda x: 1.0 if x < length else 0.0


short_answers, long_answers = log_normal(800, 0.7), log_normal(8_000, 0.7)


def predicted_s(work: RoundShape, survival, tp: int) -> float:
    capacity = capacity_tokens(QWEN_8B, tp, DEVICES.memory_bytes, DEVICES.fraction)
    return round_time_s(SPEED, RoundProgress(survival), work, tp=tp, replicas=8 // tp, capacity=capacity)


def planned(
    work: RoundShape,
    survival,
    *,
    state: ParallelismState | None = None,
    speed: DecodeSpeed = SPEED,
    kind: RoundKind = "short",
    kinds: tuple[RoundKind, ...] = ("short",),
    devices: LocalDevices = DEVICES,
) -> ParallelismPlan:
    return plan(
        ParallelismConfig(),
        ParallelismState(home_tp=1) if state is None else state,
        kind,
        work,
        shape=QWEN_8B,
        devices=devices,
        speed=speed,
        progress=RoundProgress(survival),
        kinds=kinds,
    )


def test_a_token_of_kv_cache_takes_144_kib():
    assert kv_bytes_per_token(QWEN_8B) == 147_456


def test_wider_copies_hold_more_kv_a_device_because_weights_are_stored_less_often():
    capacities = [capacity_tokens(QWEN_8B, tp, 80_000_000_000, 0.85) for tp in (1, 2, 4, 8)]
    assert capacities == [322_808, 783_962, 1_706_271, 3_550_889]
    a_device = [capacity / tp for capacity, tp in zip(capacities, (1, 2, 4, 8), strict=True)]
    assert a_device == sorted(a_device)


def test_a_copy_whose_weights_do_not_fit_has_no_capacity():
    assert capacity_tokens(QWEN_8B, 1, 20_000_000_000, 0.9) == 0
    assert tensor_parallel_sizes(QWEN_8B, LocalDevices(8, 20_000_000_000, 0.9)) == [2, 4, 8]
    assert tensor_parallel_sizes(QWEN_8B, LocalDevices(6, 80_000_000_000, 0.9)) == [1, 2]
    assert tensor_parallel_sizes(QWEN_8B, LocalDevices(4, 1_000_000_000, 0.9)) == [4]


def test_beyond_one_device_a_head_the_kv_cache_is_stored_twice():
    without = capacity_tokens(QWEN_8B, 8, 80_000_000_000, 0.85)
    assert capacity_tokens(QWEN_8B, 16, 80_000_000_000, 0.85) < 1.05 * without


def test_samples_of_one_length_peak_where_they_end():
    assert peak_tokens(all_of_length(10**9), 100, 512, 8_192) == 100 * (512 + 8_192)
    assert 100 * 1_512 <= peak_tokens(all_of_length(1_000), 100, 512, 8_192) <= 1.05 * 100 * 1_512


@given(
    median=st.floats(10, 20_000),
    sigma=st.floats(0.1, 1.5),
    prompt_tokens=st.integers(0, 4_000),
    cap=st.integers(1, 32_768),
)
def test_the_peak_is_never_too_low_and_at_most_five_percent_too_high(median, sigma, prompt_tokens, cap):
    survival = log_normal(median, sigma)
    lengths = [cap * i / 500 for i in range(501)]
    true_peak = max(10 * survival(t) * (prompt_tokens + t) for t in lengths)
    peak = peak_tokens(survival, 10, prompt_tokens, cap)
    assert true_peak <= peak * (1 + 1e-9)
    finer = max(10 * survival(t) * (prompt_tokens + t) for t in [2 ** (i / 100) for i in range(1501)] if t <= cap)
    assert peak <= max(true_peak, finer) * 1.06 + 10


def test_two_devices_a_copy_shorten_short_rounds_and_lengthen_long_ones():
    """Published: 1029 s to 768 s and 1172 s to 1284 s."""
    assert predicted_s(SHORT, short_answers, 2) < 0.9 * predicted_s(SHORT, short_answers, 1)
    assert predicted_s(LONG, long_answers, 2) > 1.05 * predicted_s(LONG, long_answers, 1)


def test_a_full_kv_cache_makes_a_round_longer():
    roomy = round_time_s(SPEED, RoundProgress(long_answers), LONG, tp=1, replicas=8, capacity=10**9)
    full = round_time_s(SPEED, RoundProgress(long_answers), LONG, tp=1, replicas=8, capacity=100_000)
    assert full > roomy
    assert round_time_s(SPEED, RoundProgress(long_answers), LONG, tp=1, replicas=8, capacity=0) == math.inf


@given(num_samples=st.integers(1, 4_000), more=st.integers(0, 4_000), tp=st.sampled_from([1, 2, 4, 8]))
def test_more_samples_never_make_a_round_shorter(num_samples, more, tp):
    few, many = RoundShape(num_samples, 512, 8_192), RoundShape(num_samples + more, 512, 8_192)
    assert predicted_s(few, short_answers, tp) <= predicted_s(many, short_answers, tp) * (1 + 1e-9)


def test_the_plan_is_the_fastest_that_fits_and_uses_all_devices():
    chosen = planned(SHORT, short_answers)
    assert (chosen.tp, chosen.replicas) == (4, 2)
    assert chosen.round_s == min(predicted_s(SHORT, short_answers, tp) for tp in (1, 2, 4, 8))


def test_a_width_whose_peak_does_not_fit_is_not_moved_to_while_another_fits():
    """320 samples of 8,192 tokens: 348,160 tokens a device, of which TP 1 holds 322,808 and TP 2 391,981."""
    work = RoundShape(num_samples=320, prompt_tokens=512, cap=8_192)
    slow_exchange = DecodeSpeed(fixed_s=0.008, per_sample_s=2e-5, per_context_token_s=6e-8, tp_exponent=0.0)
    state = ParallelismState(home_tp=8)
    assert planned(work, all_of_length(10**9), speed=slow_exchange, state=state).tp == 2
    assert 1 not in state.times_by_kind["short"]


def test_where_nothing_fits_samples_wait_and_the_fastest_is_taken():
    chosen = planned(LONG, all_of_length(10**9))
    times = {tp: predicted_s(LONG, all_of_length(10**9), tp) for tp in (1, 2, 4, 8)}
    assert chosen.tp == min(times, key=lambda tp: times[tp])


def test_home_stays_until_another_width_saves_more_than_five_percent():
    times = {tp: predicted_s(SHORT, short_answers, tp) for tp in (1, 2, 4, 8)}
    assert 0.95 < times[4] / times[8] < 1.0
    kept = planned(SHORT, short_answers, state=ParallelismState(home_tp=8))
    assert kept.tp == 8
    assert "stays" in kept.why


def test_home_moves_only_when_every_kind_of_round_was_seen_and_none_loses_by_it():
    both: tuple[RoundKind, ...] = ("short", "long")
    state = ParallelismState(home_tp=1)
    planned(SHORT, short_answers, state=state, kinds=both)
    assert state.home_tp == 1
    planned(LONG, long_answers, state=state, kind="long", kinds=both)
    assert state.home_tp == 1, "long rounds would take longer"
    state = ParallelismState(home_tp=1)
    for kind in both:
        planned(SHORT, short_answers, state=state, kind=kind, kinds=both)
    assert state.home_tp == 4
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(state), type=ParallelismState) == state


def test_a_kind_of_round_does_not_leave_home_if_the_way_back_costs_the_other_kind_much():
    state = ParallelismState(home_tp=1, times_by_kind={"long": {1: 100.0}})
    assert planned(SHORT, short_answers, state=state, kinds=("short", "long")).tp == 1
    state = ParallelismState(home_tp=1, times_by_kind={"long": {1: 1000.0}})
    assert planned(SHORT, short_answers, state=state, kinds=("short", "long")).tp == 4


def test_no_engine_is_wider_than_a_server():
    server_of_two = LocalDevices(num_devices=8, memory_bytes=80_000_000_000, fraction=0.85, max_tp=2)
    assert tensor_parallel_sizes(QWEN_8B, server_of_two) == [1, 2]
    assert planned(LONG, short_answers, devices=server_of_two).tp <= 2


def test_a_race_that_closes_early_is_over_early():
    """Of 1,600 samples the last tenth are stopped at 1,000 tokens: nothing is predicted beyond."""

    def runs(x):
        return 1.0 if x <= 1 else max(0.1, 1 - x / 1000) if x < 1000 else 0.0

    closed = round_time_s(SPEED, RoundProgress(runs, runs), SHORT, tp=1, replicas=8, capacity=10**9)
    assert closed < 1000 * SPEED.step_s(1, 200, 200 * 1512)


def test_what_exceeds_the_slots_waits_its_turn():
    few = msgspec.structs.replace(SHORT, slots=20)
    at_once, in_turns = (
        round_time_s(SPEED, RoundProgress(short_answers), work, tp=1, replicas=8, capacity=10**9)
        for work in (SHORT, few)
    )
    assert in_turns > 1.5 * at_once


def after_rounds(tp: int, *shares: float, watch: PreemptionWatch | None = None) -> list[int]:
    watch = PreemptionWatch() if watch is None else watch
    widths = []
    for share in shares:
        tp = watch.after_round(tp, share, allowed=[1, 2, 4, 8]).tp
        widths.append(tp)
    return widths


def test_a_jump_in_preemptions_doubles_the_width():
    assert after_rounds(1, 0.01, 0.04, 0.12, 0.15, 0.21) == [1, 1, 2, 2, 4]


def test_four_rounds_without_a_preemption_halve_the_width():
    assert after_rounds(4, 0, 0, 0, 0, 0, 0, 0, 0) == [4, 4, 4, 2, 2, 2, 2, 1]
    assert after_rounds(4, 0, 0, 0, 0.01, 0) == [4] * 5


def test_the_watch_stays_within_the_sizes_allowed():
    assert after_rounds(8, 0.5) == [8]
    assert after_rounds(1, 0, 0, 0, 0) == [1] * 4
    advice = PreemptionWatch(num_calm=3).after_round(2, 0.0, allowed=[2, 4, 8])
    assert advice.tp == 2
    assert "limit" in advice.why


@given(shares=st.lists(st.sampled_from([0.0, 0.0, 0.03, 0.1, 0.5]), max_size=40))
def test_a_watch_saved_and_loaded_goes_on_like_the_one_that_was_not(shares):
    watch = PreemptionWatch()
    for share in shares:
        loaded = msgspec.msgpack.decode(msgspec.msgpack.encode(watch), type=PreemptionWatch)
        assert after_rounds(2, share, watch=watch) == after_rounds(2, share, watch=loaded)
        assert loaded == watch


def test_no_width_is_worth_a_change_where_rewards_alone_make_the_round_as_long():
    free = planned(SHORT, short_answers)
    bound_s = predicted_s(SHORT, short_answers, 1)
    bound = planned(msgspec.structs.replace(SHORT, at_least_s=bound_s), short_answers)
    assert free.tp > 1 == bound.tp
    assert bound.round_s == bound_s


def test_the_wait_for_rewards_is_part_of_a_round_at_every_width():
    waits = msgspec.structs.replace(SHORT, rewards_s=100.0)
    for tp in (1, 2, 4):
        assert math.isclose(predicted_s(waits, short_answers, tp), predicted_s(SHORT, short_answers, tp) + 100.0)
