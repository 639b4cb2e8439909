"""The engine model against a reference that decodes step by step, and the laws that it keeps."""

from math import inf, pi

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrl.engines.lockstep import EngineModel, EngineTimes


def times(**changes) -> EngineTimes:
    plain = {"step_fixed_s": 0.5, "prefill_tokens_per_s": 1e12, "kv_tokens": 10**9, "slots": 64}
    return EngineTimes(**{**plain, **changes})


def start(engine, lease: int, now: float, total: int, *, prompt: int = 10, from_token: int = 0, prefix=None) -> None:
    engine.start(lease, now, prompt_tokens=prompt, from_token=from_token, total_tokens=total, prefix=prefix)


class StepByStep:
    """The same engine, written to be obviously right: it decodes at most one token at a time and indexes nothing."""

    def __init__(self, engine: EngineTimes, speed: float) -> None:
        self.engine, self.speed, self.kv_tokens = engine, speed, engine.kv_tokens
        self.now = self.stalled_until = 0.0
        self.running: list[list] = []  # [lease, prompt, tokens, total, prefix], by admission
        self.waiting: list[list] = []
        self.finished: list[tuple[int, int, float]] = []
        self.num_preemptions = 0

    def context(self) -> float:
        return sum(prompt + tokens for _, prompt, tokens, _, _ in self.running)

    def seconds(self, share: float) -> float:
        """Of one step, or of a share of it: the batch pays for the context in the middle of that share."""
        num = len(self.running)
        context = self.context() + num * share / 2
        engine = self.engine
        step_s = engine.step_fixed_s + engine.step_sample_s * num + engine.step_context_s * context
        return share * step_s / self.speed

    def share_within(self, seconds: float) -> float:
        low, high = 0.0, 1.0
        for _ in range(100):
            middle = (low + high) / 2
            low, high = (middle, high) if self.seconds(middle) <= seconds else (low, middle)
        return low

    def play_until(self, now: float) -> None:
        while self.now < now:
            if self.now < self.stalled_until or not self.running:
                self.now = min(now, self.stalled_until) if self.running else now
                continue
            share = min(1.0, *(total - tokens for _, _, tokens, total, _ in self.running))
            if len(self.running) > 1:
                share = min(share, max(0.0, (self.kv_tokens - self.context()) / len(self.running)))
            is_cut = self.now + self.seconds(share) > now
            if is_cut:
                share = self.share_within(now - self.now)
            self.now = now if is_cut else self.now + self.seconds(share)
            for sample in self.running:
                sample[2] += share
            if not is_cut:
                self.change()

    def change(self) -> None:
        done = [sample for sample in self.running if sample[2] >= sample[3] - 1e-9]
        self.running = [sample for sample in self.running if sample not in done]
        self.finished += [(lease, total, self.now) for lease, _, _, total, _ in done]
        if not done and len(self.running) > 1 and self.context() >= self.kv_tokens - 1e-9:
            newest = self.running.pop()
            newest[2] = int(newest[2] + 1e-6)
            self.waiting.insert(0, newest)
            self.num_preemptions += 1
        self.admit()

    def admit(self) -> None:
        engine = self.engine
        while self.waiting and len(self.running) < engine.slots:
            sample = self.waiting[0]
            _, prompt, tokens, _, prefix = sample
            margin = max(0.01 * self.kv_tokens, len(self.running) + 1)
            if self.running and self.context() + prompt + tokens + margin > self.kv_tokens:
                return
            shares = prefix is not None and prefix in [other[4] for other in self.running]
            num_prefilled = tokens + 1 if shares else prompt + tokens
            stall_s = num_prefilled / engine.prefill_tokens_per_s / self.speed
            self.stalled_until = max(self.stalled_until, self.now) + stall_s
            self.running.append(self.waiting.pop(0))

    def start(self, lease: int, now: float, prompt: int, from_token: int, total: int, prefix: int | None) -> None:
        self.play_until(now)
        self.waiting.append([lease, prompt, from_token, total, prefix])
        self.admit()

    def stop(self, lease: int, now: float) -> int | None:
        self.play_until(now)
        for queue in (self.running, self.waiting):
            for sample in queue:
                if sample[0] == lease:
                    queue.remove(sample)
                    self.admit()
                    return int(sample[2] + 1e-6)
        return None

    def tokens(self) -> dict[int, float]:
        return {lease: tokens for lease, _, tokens, _, _ in [*self.running, *self.waiting]}


engines = st.builds(
    lambda context_s, sample_s, prefill, kv, slots: times(
        step_context_s=context_s, step_sample_s=sample_s, prefill_tokens_per_s=prefill, kv_tokens=kv, slots=slots
    ),
    st.sampled_from([0.0, 0.00137, 0.0211]),
    st.sampled_from([0.0, 0.0171]),
    st.sampled_from([17.3, 1e12]),
    st.sampled_from([25, 60, 150, 10**6]),
    st.integers(1, 5),
)
# Irrational gaps: that two different moments fall together is then a matter of the model and not of the rounding.
gaps = st.integers(0, 300).map(lambda ticks: ticks * pi / 100)
starts = st.tuples(
    gaps, st.just("start"), st.integers(1, 30), st.integers(0, 12), st.integers(0, 40), st.none() | st.integers(0, 2)
)
stops = st.tuples(gaps, st.just("stop"), st.integers(0, 12), st.just(0), st.just(0), st.none())
histories = st.lists(starts | starts | stops, max_size=14)
speeds = st.sampled_from([1.0, 0.5, 1.7])


def play(engine: EngineModel, history, *, on_change=lambda now: None, on_the_way=lambda now: None) -> list[tuple]:
    """Play a history the way the simulation does, stopping at every change; tell all that came out."""
    told: list[tuple] = []
    now, lease = 0.0, 0

    def advance_to(until: float) -> None:
        reached = now
        while (at := engine.next_change()) is not None and at <= until:
            on_the_way((reached + at) / 2)
            told.extend(engine.advance(at))
            on_change(at)
            reached = at
        on_the_way((reached + until) / 2)
        told.extend(engine.advance(until))

    for gap, kind, first, from_token, more, prefix in history:
        advance_to(now + gap)
        now += gap
        if kind == "start":
            start(engine, lease, now, from_token + more, prompt=first, from_token=from_token, prefix=prefix)
            lease += 1
        else:
            told.append(("stopped", first, engine.stop(first, now)))
        on_change(now)
    advance_to(now + 1e9)
    return told


@settings(max_examples=200)
@given(engines, speeds, histories)
def test_it_tells_the_same_as_decoding_step_by_step(engine, speed, history):
    model, reference = EngineModel(engine, speed), StepByStep(engine, speed)
    now, lease = 0.0, 0
    told = []
    for gap, kind, first, from_token, more, prefix in history:
        now += gap
        told += model.advance(now)
        reference.play_until(now)
        assert dict(zip(*model.progress(now), strict=True)) == {
            lease: int(tokens + 1e-6) for lease, tokens in reference.tokens().items()
        }
        assert model.kv_used(now) == pytest.approx(reference.context(), abs=1.01)
        if kind == "start":
            start(model, lease, now, from_token + more, prompt=first, from_token=from_token, prefix=prefix)
            reference.start(lease, now, first, from_token, from_token + more, prefix)
            lease += 1
        else:
            assert model.stop(first, now) == reference.stop(first, now)
        assert (model.num_running, model.num_waiting) == (len(reference.running), len(reference.waiting))
    told += model.advance(now + 1e5)
    reference.play_until(now + 1e5)
    assert [(lease, tokens) for lease, tokens, _ in told] == [
        (lease, tokens) for lease, tokens, _ in reference.finished
    ]
    assert [at for _, _, at in told] == pytest.approx([at for _, _, at in reference.finished], abs=1e-6)
    assert model.num_preemptions == reference.num_preemptions
    assert model.is_idle


@given(engines, speeds, histories)
def test_every_sample_finishes_once_or_is_stopped_and_no_token_is_lost(engine, speed, history):
    model = EngineModel(engine, speed)
    seen: dict[int, int] = {}

    def check(now: float) -> None:
        leases, tokens = model.progress(now)
        assert len(leases) == model.num_running + model.num_waiting
        assert model.num_running <= engine.slots
        for lease, count in zip(leases, tokens, strict=True):
            assert count >= seen.get(lease, 0)
            seen[lease] = count
        assert model.num_running <= 1 or model.kv_used(now) <= engine.kv_tokens

    told = play(model, history, on_change=check)
    finished = {entry[0]: entry[1] for entry in told if entry[0] != "stopped"}
    stopped = {entry[1]: entry[2] for entry in told if entry[0] == "stopped" and entry[2] is not None}
    begun = [entry for entry in history if entry[1] == "start"]
    assert sorted([*finished, *stopped]) == list(range(len(begun)))
    assert all(finished[lease] == begun[lease][3] + begun[lease][4] for lease in finished)
    assert all(tokens >= begun[lease][3] for lease, tokens in stopped.items())
    made = sum({**finished, **stopped}.values()) - sum(entry[3] for entry in begun)
    assert model.tokens_decoded(1e12) == made
    assert model.is_idle
    assert model.next_change() is None


@given(engines, speeds, histories)
def test_the_same_history_is_told_the_same_to_the_last_bit(engine, speed, history):
    assert play(EngineModel(engine, speed), history) == play(EngineModel(engine, speed), history)


@given(engines, histories)
def test_looking_changes_nothing(engine, history):
    watched = EngineModel(engine)

    def look(now: float) -> None:
        change = watched.next_change()
        watched.progress(now)
        watched.kv_used(now)
        watched.tokens_decoded(now)
        assert watched.next_change() == change

    assert play(watched, history, on_the_way=look) == play(EngineModel(engine), history)


def test_a_batch_decodes_in_lock_step_and_the_step_grows_with_batch_and_context():
    engine = EngineModel(times(step_sample_s=0.1, step_context_s=0.01))
    start(engine, 1, 0.0, 4)
    start(engine, 2, 0.0, 4)
    # Four steps of 0.5 + 2 * 0.1 + 0.01 * C, with C = 21, 23, 25, 27 in their middles.
    assert engine.advance(100.0) == [(1, 4, pytest.approx(3.76)), (2, 4, pytest.approx(3.76))]


def test_what_finishes_at_now_has_finished_before_it_can_be_stopped():
    engine = EngineModel(times())
    start(engine, 1, 0.0, 4)
    at = engine.next_change()
    assert at is not None
    assert engine.stop(1, at) is None
    assert engine.advance(at) == [(1, 4, at)]


def test_an_unknown_lease_is_stopped_without_complaint():
    assert EngineModel(times()).stop(7, 1.0) is None


def test_a_slow_worker_takes_longer_by_its_factor():
    ends = []
    for speed in (1.0, 0.5):
        engine = EngineModel(times(prefill_tokens_per_s=10.0, step_context_s=0.01), speed)
        start(engine, 1, 0.0, 8)
        ends += [at for _, _, at in engine.advance(1e6)]
    assert ends[1] == pytest.approx(2 * ends[0])


def test_admission_stalls_the_batch_for_its_prefill():
    engine = EngineModel(times(prefill_tokens_per_s=10.0))
    start(engine, 1, 0.0, 4, prompt=10)  # prefill 1 s, then 4 steps of 0.5 s
    start(engine, 2, 2.0, 4, prompt=20, from_token=3)  # 2 tokens in; 2.3 s of stall, then one step each
    assert engine.advance(2.0 + 2.29) == []
    assert engine.progress(2.0 + 2.29) == ([1, 2], [2, 3])
    assert engine.advance(1e6) == [(2, 4, pytest.approx(4.8)), (1, 4, pytest.approx(5.3))]


def test_a_prefix_that_runs_here_is_not_prefilled_again_until_its_last_sample_left():
    engine = EngineModel(times(prefill_tokens_per_s=10.0))
    start(engine, 1, 0.0, 1, prompt=20, prefix=5)  # 2.0 s
    start(engine, 2, 0.0, 1, prompt=20, prefix=5)  # 0.1 s
    start(engine, 3, 0.0, 10, prompt=20, from_token=9, prefix=5)  # 1.0 s
    assert [at for _, _, at in engine.advance(50.0)] == pytest.approx([3.6, 3.6, 3.6])
    start(engine, 4, 50.0, 1, prompt=20, prefix=5)
    assert engine.advance(100.0) == [(4, 1, pytest.approx(52.5))]


def test_samples_beyond_the_slots_wait_in_order_and_can_be_stopped_there():
    engine = EngineModel(times(slots=1))
    for lease in range(4):
        start(engine, lease, 0.0, 2, from_token=1)
    assert (engine.num_running, engine.num_waiting) == (1, 3)
    assert engine.stop(1, 0.1) == 1
    assert [lease for lease, _, _ in engine.advance(1e6)] == [0, 2, 3]


def test_a_full_cache_preempts_the_newest_which_keeps_its_tokens_and_comes_back():
    engine = EngineModel(times(kv_tokens=40, prefill_tokens_per_s=100.0))
    start(engine, 1, 0.0, 15)
    start(engine, 2, 0.0, 15)
    overflow = engine.next_change()
    assert overflow is not None
    assert overflow == pytest.approx(0.2 + 10 * 0.5)  # 2 * 10 prompt tokens and 2 * 10 of the answers
    assert engine.advance(overflow) == []
    assert engine.num_preemptions == 1
    assert engine.progress(overflow) == ([1, 2], [10, 10])
    # The first ends after 5 more steps; the second pays for 20 tokens again and does its 5.
    assert engine.advance(1e6) == [(1, 15, pytest.approx(7.7)), (2, 15, pytest.approx(10.4))]
    assert engine.tokens_decoded(1e6) == 30


def test_one_sample_alone_may_outgrow_the_cache():
    engine = EngineModel(times(kv_tokens=5))
    start(engine, 1, 0.0, 50)
    start(engine, 2, 0.0, 50)
    assert [lease for lease, _, _ in engine.advance(1e6)] == [1, 2]
    assert engine.num_preemptions == 0


def test_a_lease_is_never_reused_and_never_starts_after_its_end():
    engine = EngineModel(times())
    start(engine, 1, 0.0, 4)
    with pytest.raises(ValueError, match="started twice"):
        start(engine, 1, 1.0, 4)
    with pytest.raises(ValueError, match="after its end"):
        start(engine, 2, 1.0, 4, from_token=5)


def test_a_cache_without_a_bound_never_preempts_nor_makes_anyone_wait():
    engine = EngineModel(times(kv_tokens=inf))
    for lease in range(3):
        start(engine, lease, 0.0, 10**6, prompt=10**6)
    assert (engine.num_running, engine.num_waiting) == (3, 0)
    assert engine.next_change() == pytest.approx(0.5 * 10**6)


def test_a_step_may_be_described_by_that_of_one_sample_and_what_each_further_one_adds():
    engine = EngineModel(times(step_fixed_s=0.1 - 0.15, step_sample_s=0.15))
    start(engine, 1, 0.0, 1000)
    assert engine.progress(1.001)[1] == [10]
    start(engine, 2, 1.001, 1000)
    assert engine.progress(1.001 + 2.501)[1] == [20, 10]


def test_a_sample_whose_context_is_still_there_prefills_only_what_is_new():
    def first_token_at(**more) -> float | None:
        engine = EngineModel(times(prefill_tokens_per_s=100.0))
        engine.start(1, 0.0, prompt_tokens=300, from_token=100, total_tokens=101, **more)
        return engine.next_change()

    assert first_token_at() == pytest.approx(4.0 + 0.5)
    assert first_token_at(cached_tokens=350) == pytest.approx(0.5 + 0.5)
    assert first_token_at(cached_tokens=400) == pytest.approx(0.01 + 0.5), "one token is computed to draw the next"


def test_a_context_that_was_kept_is_gone_after_a_preemption():
    engine = EngineModel(times(prefill_tokens_per_s=100.0, kv_tokens=30, step_fixed_s=1.0))
    start(engine, 1, 0.0, 15, prompt=5)
    engine.start(2, 0.0, prompt_tokens=9, from_token=0, total_tokens=12, cached_tokens=8)
    finished = {}
    while (at := engine.next_change()) is not None:
        finished |= {lease: when for lease, _, when in engine.advance(at)}
    assert engine.num_preemptions == 1
    first_prefills = (5 + 1) / 100.0
    second_prefill = (9 + 8) / 100.0  # its prompt, and the tokens that it had
    assert finished[1] == pytest.approx(first_prefills + 15.0)
    assert finished[2] == pytest.approx(finished[1] + second_prefill + 4.0)
