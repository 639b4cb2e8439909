"""The emulated engine: the contract, what makes it predictable, and what it costs.

`Batch` is played on moments that are passed in; where the engine itself runs, its clock is fast and waits are short.
"""

import asyncio
import time
from math import log

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.contracts.engine_contract import ON, EngineContract, RecordingSink, Stage

from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.engines.emulated.batch import Batch, EmulatedSample
from polyrl.engines.emulated.text import EOS, EmulatedEnd, answer_tokens, draw
from polyrl.engines.engine import Engine, EngineError, Job, Weights
from polyrl.errors import ConfigError
from polyrl.ids import LeaseId, SampleId, Version
from polyrl.wire.frames import Sampling


def config(**changes) -> EmulatedConfig:
    fast = {"speedup": 100.0, "prefill_tokens_per_s": 1e6, "median_tokens": 20.0, "version": 3}
    return msgspec.convert({**fast, **changes}, EmulatedConfig)


class TestEmulatedEngine(EngineContract):
    long_tokens = 100_000
    patience_s = 10.0

    def engine(self) -> Engine:
        return EmulatedEngine(config(slots=8))


def play(script, **changes) -> None:
    TestEmulatedEngine().play(script, EmulatedEngine(config(**changes)))


def length_of(seed: int, prompt: list[int], recorded: tuple[int, ...] = (), **changes) -> int:
    job = Job(LeaseId(1), SampleId(1), prompt, [], 100, seed, Sampling())
    return answer_tokens(job, config(**changes), list(recorded))


# What is written


def test_an_answer_of_its_own_length_ends_with_the_end_of_text_and_has_it_nowhere_else():
    async def script(stage: Stage) -> None:
        for seed in range(20):
            lease = stage.begin(seed=seed, max_tokens=10_000)
            assert await stage.sink.end_of(lease) == "stop"
            text = stage.sink.texts[lease]
            assert len(text) == length_of(seed, TestEmulatedEngine.prompt)
            assert text.index(EOS) == len(text) - 1

    play(script)


def test_tokens_and_log_probabilities_depend_on_the_seed_and_not_on_version_load_or_engine():
    async def script(stage: Stage) -> None:
        crowd = [stage.begin(seed=seed, max_tokens=300, sampling=ON) for seed in range(8)]
        for lease in crowd:
            await stage.sink.end_of(lease)
        assert len({tuple(stage.sink.texts[lease]) for lease in crowd}) == 8
        async with TestEmulatedEngine().on_stage(EmulatedEngine(config(version=9))) as alone:
            again = alone.begin(seed=4, max_tokens=300, sampling=ON)
            await alone.sink.end_of(again)
            assert alone.sink.texts[again] == stage.sink.texts[crowd[4]]
            assert alone.sink.logprobs[again] == stage.sink.logprobs[crowd[4]]
            assert alone.sink.versions[again] == [9] * 300

    play(script)


def test_a_sample_cut_anywhere_ends_where_it_would_have_ended():
    async def script(stage: Stage) -> None:
        whole = await stage.text(seed=5, max_tokens=10_000)
        for cut in range(len(whole)):
            assert whole[:cut] + await stage.text(seed=5, so_far=whole[:cut], max_tokens=10_000) == whole
        finished = stage.begin(seed=5, so_far=whole, max_tokens=10_000)
        assert await stage.sink.end_of(finished) == "stop"
        assert finished not in stage.sink.texts

    play(script)


@given(
    st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 10**6), st.integers(1, 40)), min_size=1, max_size=8),
    st.integers(4, 200_000),
)
@settings(max_examples=50)
def test_tokens_drawn_together_are_those_drawn_one_by_one(rows, vocab):
    keys, starts, counts = (list(column) for column in zip(*rows, strict=True))
    tokens, logprobs = draw(keys, starts, counts, vocab)
    single = [draw([key], [start + at], [1], vocab) for key, start, num in rows for at in range(num)]
    assert tokens.tolist() == [int(one[0][0]) for one in single]
    assert logprobs.tolist() == [float(one[1][0]) for one in single]
    assert 3 <= tokens.min() <= tokens.max() < vocab
    assert -8 < logprobs.min() <= logprobs.max() <= 0


def test_drawn_lengths_have_the_median_and_the_spread_asked_for():
    logs = [log(length_of(seed, [seed], median_tokens=1000.0, sigma=0.8)) for seed in range(4000)]
    assert np.median(logs) == pytest.approx(log(1000), abs=0.06)
    assert np.std(logs) == pytest.approx(0.8, rel=0.06)


@pytest.mark.parametrize("correlation", [0.0, 0.6, 1.0])
def test_answers_to_one_prompt_are_as_alike_as_asked_for(correlation):
    def log_length(seed: int, prompt: int) -> float:
        return log(length_of(seed, [prompt], median_tokens=1e6, correlation=correlation))

    pairs = [(log_length(2 * prompt, prompt), log_length(2 * prompt + 1, prompt)) for prompt in range(2000)]
    assert np.corrcoef(np.array(pairs).T)[0, 1] == pytest.approx(correlation, abs=0.06)


def test_recorded_lengths_are_picked_by_the_seed(tmp_path):
    trace = tmp_path / "lengths.jsonl"
    trace.write_text("7\n11\n\n30\n")
    texts: list[list[list[int]]] = []

    async def script(stage: Stage) -> None:
        texts.append([await stage.text(seed=seed, max_tokens=100) for seed in range(12)])

    play(script, trace=str(trace))
    play(script, trace=str(trace))
    assert texts[0] == texts[1]
    assert {len(text) for text in texts[0]} == {7, 11, 30}


@pytest.mark.parametrize(
    ("content", "complaint"), [("7\nten\n", r"lengths:2: got 'ten'"), ("7\n0\n", "lengths:2"), ("\n", "no lengths")]
)
def test_a_trace_that_cannot_be_used_is_refused_with_its_line(tmp_path, content, complaint):
    trace = tmp_path / "lengths"
    trace.write_text(content)
    with pytest.raises(ConfigError, match=complaint):
        EmulatedEngine(config(trace=str(trace)))
    with pytest.raises(ConfigError, match="cannot be read"):
        EmulatedEngine(config(trace=str(tmp_path / "gone")))


# Who runs, and how fast: on moments that are passed in


def batch(**changes) -> Batch:
    return Batch(config(**{"tokens_per_s": 10.0, "step_per_sample_s": 0.0, "prefill_tokens_per_s": 1e9, **changes}))


def sample(lease: int, num_tokens: int, *, prompt: int = 1, so_far: int = 0) -> EmulatedSample:
    return EmulatedSample(LeaseId(lease), prompt, so_far, EmulatedEnd(num_tokens, "stop", True))


def news(a_batch: Batch, now: float) -> tuple[dict[int, int], list[int]]:
    """How far samples are that got further, and which ended."""
    grown, ended = a_batch.take_news(now)
    for one, num_tokens in grown:
        one.told = num_tokens
    return {one.lease: num_tokens for one, num_tokens in grown}, [one.lease for one in ended]


def test_a_sample_alone_runs_at_its_speed_and_news_is_told_once():
    one = batch()
    one.start(sample(1, 30), 100.0)
    assert news(one, 101.05) == ({1: 10}, [])
    assert news(one, 101.05) == ({}, [])
    assert news(one, 110.0) == ({1: 30}, [1])
    assert one.is_idle


def test_every_further_sample_makes_the_step_longer():
    """Steps of 100 ms, and 50 ms more for the second sample until it ends after 1.5 s."""
    one = batch(step_per_sample_s=0.05)
    one.start(sample(1, 1000), 0.0)
    one.start(sample(2, 10), 0.0)
    assert news(one, 1.51) == ({1: 10, 2: 10}, [2])
    assert news(one, 2.51) == ({1: 20}, [])


def test_a_prompt_and_what_is_there_of_an_answer_are_prefilled_one_sample_after_the_other():
    one = batch(prefill_tokens_per_s=100.0)
    one.start(sample(1, 1000, prompt=50), 0.0)
    one.start(sample(2, 1000, prompt=50, so_far=50), 0.0)
    assert news(one, 0.45) == ({}, [])
    assert news(one, 1.55) == ({1: 10}, [])
    one.stop(LeaseId(1), 1.55)
    assert news(one, 2.55) == ({2: 60}, [])


def test_samples_beyond_the_slots_wait_and_take_a_place_at_the_very_moment_it_is_free():
    one = batch(slots=2)
    for lease, num_tokens in ((1, 10), (2, 40), (3, 10)):
        one.start(sample(lease, num_tokens), 0.0)
    assert (one.num_running, one.num_waiting) == (2, 1)
    # Nobody looked while it happened: the third ran from 1 s to 2 s all the same.
    assert news(one, 2.05) == ({1: 10, 2: 20, 3: 10}, [1, 3])


def test_a_full_cache_throws_the_newest_out_which_comes_back_with_its_tokens():
    """100 tokens of cache, two samples that want 80 each: the first never stops, the second waits for it to end."""
    one = batch(kv_tokens=100)
    one.start(sample(1, 80), 0.0)
    one.start(sample(2, 80), 0.0)
    grown, ended = news(one, 5.05)
    assert (one.num_running, one.num_waiting, one.num_preemptions) == (1, 1, 1)
    assert (grown, ended) == ({1: 50, 2: 49}, [])
    assert one.context <= 100
    assert news(one, 8.05) == ({1: 80}, [1])
    assert news(one, 11.2) == ({2: 80}, [2])
    assert one.num_preemptions == 1


def test_a_sample_thrown_out_does_not_come_back_for_the_fraction_of_a_token_that_it_lost():
    one = batch(kv_tokens=20)
    one.start(sample(1, 80), 0.0)
    one.start(sample(2, 80), 0.055)
    one.settle(1.5)
    assert (one.num_waiting, one.num_preemptions) == (1, 1)


def test_a_sample_thrown_out_is_first_in_line():
    one = batch(kv_tokens=100, slots=2)
    for lease, num_tokens in ((1, 80), (2, 80), (3, 5)):
        one.start(sample(lease, num_tokens), 0.0)
    assert news(one, 7.05) == ({1: 70, 2: 49}, [])
    assert news(one, 9.05) == ({1: 80, 2: 59, 3: 5}, [1, 3])


def test_the_cache_holds_the_context_of_those_that_run():
    one = batch(kv_tokens=1000)
    for at, lease in enumerate((1, 2, 3)):
        one.start(sample(lease, 80, prompt=100 * lease), float(at))
    assert one.context == pytest.approx(600 + 20 + 10, abs=0.1)
    one.stop(LeaseId(2), 3.0)
    assert one.context == pytest.approx(400 + 30 + 10, abs=0.1)


def test_a_sample_that_outgrows_the_cache_alone_still_runs():
    one = batch(kv_tokens=20)
    one.start(sample(1, 80), 0.0)
    assert news(one, 8.05) == ({1: 80}, [1])


def test_stopping_a_sample_makes_room_at_once():
    one = batch(slots=1)
    for lease in (1, 2, 3):
        one.start(sample(lease, 100), 0.0)
    one.stop(LeaseId(1), 1.0)
    one.stop(LeaseId(3), 1.0)
    assert (one.num_running, one.num_waiting) == (1, 0)
    assert news(one, 2.05) == ({2: 10}, [])


_ACTS = st.lists(
    st.tuples(st.floats(0.0, 3.0), st.sampled_from(["start", "stop", "look"]), st.integers(1, 10), st.integers(0, 40)),
    max_size=40,
)
_BATCHES = st.builds(
    dict,
    slots=st.integers(1, 4),
    kv_tokens=st.sampled_from([0, 30, 60]),
    step_per_sample_s=st.sampled_from([0.0, 0.03]),
    prefill_tokens_per_s=st.just(50.0),
)


@given(_ACTS, _BATCHES)
@settings(max_examples=150)
def test_whatever_comes_and_goes_everybody_ends_or_is_stopped_and_the_cache_is_given_back(acts, changes):
    one, now = batch(**changes), 0.0
    live: list[int] = []
    for lease, (wait_s, act, prompt, num_tokens) in enumerate(acts):
        now += wait_s
        if act == "start":
            live.append(lease)
            one.start(sample(lease, num_tokens, prompt=prompt), now)
        elif act == "stop" and live:
            one.stop(LeaseId(live.pop(prompt % len(live))), now)
        for ended in news(one, now)[1]:
            live.remove(ended)  # raises if it had ended before, or was stopped
        assert one.num_running <= changes["slots"]
        assert one.num_running <= 1 or not changes["kv_tokens"] or one.context <= changes["kv_tokens"] + 1e-6
    assert sorted(news(one, now + 1e4)[1]) == live
    assert one.is_idle
    assert one.context == 0


@given(_ACTS, _BATCHES)
@settings(max_examples=150)
def test_how_often_one_looks_changes_nothing(acts, changes):
    watched, left_alone, now = batch(**changes), batch(**changes), 0.0
    for lease, (wait_s, act, prompt, num_tokens) in enumerate(acts):
        for look in range(5):
            watched.settle(now + wait_s * look / 5)
        now += wait_s
        if act == "start":
            watched.start(sample(lease, num_tokens, prompt=prompt), now)
            left_alone.start(sample(lease, num_tokens, prompt=prompt), now)
    assert news(watched, now) == news(left_alone, now)
    assert watched.num_preemptions == left_alone.num_preemptions
    assert watched.context == pytest.approx(left_alone.context)


# The engine


def test_a_fast_clock_makes_the_same_answer_in_a_fraction_of_the_time():
    async def seconds(speedup: float) -> float:
        async with TestEmulatedEngine().on_stage(EmulatedEngine(config(speedup=speedup))) as stage:
            began_at = time.monotonic()
            await stage.text(max_tokens=50, sampling=ON)
            return time.monotonic() - began_at

    slow, fast = asyncio.run(seconds(2.0)), asyncio.run(seconds(20.0))
    assert slow >= 0.5  # 50 tokens are a second
    assert 0.05 <= fast < slow / 2


def test_samples_beyond_the_slots_and_the_cache_show_in_its_stats():
    async def script(stage: Stage) -> None:
        for _ in range(5):
            stage.begin(prompt=[5] * 10, max_tokens=10_000, sampling=ON)
        stats = stage.engine.stats()
        assert (stats.num_running, stats.num_waiting, stats.slots) == (4, 1, 4)
        await stage.sink.until(lambda: stage.engine.stats().num_preemptions > 0)
        stats = stage.engine.stats()
        assert stats.num_running < 4
        assert stats.num_running + stats.num_waiting == 5
        assert 0.5 < stats.kv_used <= 1

    play(script, slots=4, kv_tokens=1000)


def test_a_context_that_can_never_fit_into_the_cache_is_refused():
    async def script(stage: Stage) -> None:
        lease = stage.begin(prompt=[5] * 1000)
        assert await stage.sink.end_of(lease) == "refused"
        assert "the cache holds 1000" in stage.sink.ends[lease][1]

    play(script, kv_tokens=1000)


def test_every_third_job_fails_halfway_and_can_be_resumed():
    async def script(stage: Stage) -> None:
        leases = [stage.begin(seed=seed, max_tokens=40, sampling=ON) for seed in range(7)]
        reasons = [await stage.sink.end_of(lease) for lease in leases]
        assert [at for at, reason in enumerate(reasons) if reason == "engine_failed"] == [2, 5]
        half = stage.sink.texts[leases[2]]
        assert len(half) == 20
        assert len(half + await stage.text(seed=2, so_far=half, max_tokens=40, sampling=ON)) == 40

    play(script, fail_every=3)


def test_before_the_first_install_jobs_are_refused():
    async def main() -> None:
        engine, sink = EmulatedEngine(EmulatedConfig(speedup=100.0)), RecordingSink()
        stage = Stage(engine, sink, await engine.start(sink), [5])
        lease = stage.begin()
        assert lease not in sink.ends, "told inside generate"
        assert await sink.end_of(lease) == "refused"
        assert sink.ends[lease][1] == "no weights are installed"
        await engine.install(Weights(Version(1)))
        assert await stage.text()
        await engine.close()

    asyncio.run(main())


def test_start_and_install_take_their_time_and_closing_ends_the_wait_in_an_error():
    async def main() -> None:
        engine, began_at = EmulatedEngine(config(start_s=5.0, install_s=10.0)), time.monotonic()
        await engine.start(RecordingSink())
        assert time.monotonic() - began_at >= 0.05
        await engine.install(Weights(Version(4)))
        assert time.monotonic() - began_at >= 0.15
        install = asyncio.create_task(engine.install(Weights(Version(5))))
        await asyncio.sleep(0)
        await engine.close()
        with pytest.raises(EngineError, match="version 5 cannot be installed: the emulated engine is closed"):
            await install

    asyncio.run(main())


def test_up_to_the_moment_of_an_install_the_old_version_wrote():
    async def script(stage: Stage) -> None:
        lease = stage.begin(max_tokens=100_000, sampling=ON)
        await stage.sink.some_of(lease)
        num_told = len(stage.sink.texts[lease])
        time.sleep(0.01)  # half a tick: what is written meanwhile is not told yet
        await stage.engine.install(Weights(Version(4)))
        num_old = len(stage.sink.texts[lease])
        assert num_old > num_told
        await stage.sink.until(lambda: len(stage.sink.texts[lease]) > num_old)
        assert stage.sink.versions[lease].index(Version(4)) == num_old

    play(script)


def test_nothing_runs_or_can_be_begun_after_closing():
    async def script(stage: Stage) -> None:
        stage.begin(max_tokens=100_000, sampling=ON)
        await stage.engine.close()
        stage.begin(max_tokens=100_000, sampling=ON)
        assert stage.engine.stats().num_running == 0

    play(script)


def test_a_job_that_is_said_twice_is_done_once():
    async def script(stage: Stage) -> None:
        job = Job(LeaseId(10**9), SampleId(1), [5], [], 500, 1, ON)
        stage.engine.generate(job)
        await stage.sink.some_of(job.lease)
        stage.engine.generate(job)
        assert stage.engine.stats().num_running == 1
        await stage.sink.end_of(job.lease)
        assert len(stage.sink.texts[job.lease]) == 500

    play(script)


def test_a_sink_that_raises_shows_in_its_health():
    class Broken(RecordingSink):
        def tokens(self, lease, tokens, logprobs, version) -> None:
            raise OSError("the disk is full")

    async def main() -> None:
        engine, sink = EmulatedEngine(config()), Broken()
        stage = Stage(engine, sink, await engine.start(sink), [5])
        stage.begin(sampling=ON)
        while engine.health() is None:
            await asyncio.sleep(0.01)
        assert "the disk is full" in str(engine.health())
        await engine.close()

    asyncio.run(asyncio.wait_for(main(), 5.0))


def test_a_full_engine_costs_a_small_part_of_a_core():
    """256 samples at 50 tokens a second; 2 to 3% were measured, with a sink that only counts."""

    class Counting:
        num_tokens = 0

        def tokens(self, lease, tokens, logprobs, version) -> None:
            self.num_tokens += len(tokens)

        def ended(self, lease, reason, detail="") -> None: ...

    async def main() -> None:
        engine, sink = EmulatedEngine(config(speedup=1.0, slots=256, step_per_sample_s=0.0)), Counting()
        await engine.start(sink)
        for lease in range(256):
            engine.generate(Job(LeaseId(lease), SampleId(lease), [5], [], 10_000, lease, ON))
        cpu_s, wall_s = time.process_time(), time.monotonic()
        await asyncio.sleep(1.0)
        cpu_s, wall_s = time.process_time() - cpu_s, time.monotonic() - wall_s
        await engine.close()
        assert sink.num_tokens == pytest.approx(256 * 50 * wall_s, rel=0.1)
        assert cpu_s < 0.1 * wall_s

    asyncio.run(main())


@pytest.mark.parametrize(
    "wrong", [{"slots": 0}, {"speedup": 0}, {"vocab": 3}, {"correlation": 1.5}, {"trace": 7}, {"slot": 4}]
)
def test_wrong_settings_are_refused(wrong):
    with pytest.raises(msgspec.ValidationError):
        config(**wrong)
