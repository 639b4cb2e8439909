"""The emulated engine: the contract, what makes it predictable, and what it costs.

Its clock is fast and waits are short. Who runs and how fast: tests/unit/test_lockstep.py.
"""

import asyncio
import time
from math import log

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyrl.engines.contract import ON, EngineContract, RecordingSink, Stage
from polyrl.engines.emulated import EmulatedConfig, EmulatedEngine
from polyrl.engines.emulated.text import EOS, answer_tokens, draw
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
