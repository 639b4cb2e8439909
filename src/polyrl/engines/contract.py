"""The contract of engines (polyrl/engines/engine.py) as a suite. An engine is held to it by a class that makes one:

    class TestMyEngine(EngineContract):
        def engine(self) -> Engine:
            return MyEngine(...)

What only some engines can do is checked where they declare it. Leases are never reused: every job has a new one.
"""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from itertools import count
from typing import Any, ClassVar

import pytest

from polyrl.engines.engine import Engine, EngineEnd, EngineInfo, Job, Weights
from polyrl.ids import LeaseId, SampleId, Version
from polyrl.wire.columns import MAX_LOGPROB
from polyrl.wire.frames import Sampling

_leases = count(1)


class RecordingSink:
    """A sink that records all calls, and fails at once on a call that no engine may make."""

    def __init__(self) -> None:
        self.texts: dict[LeaseId, list[int]] = {}
        self.logprobs: dict[LeaseId, list[float]] = {}
        self.versions: dict[LeaseId, list[Version]] = {}
        self.ends: dict[LeaseId, tuple[EngineEnd, str]] = {}
        self.num_calls = 0
        self.problems: list[str] = []
        self._thread = threading.get_ident()
        self._heard = asyncio.Event()

    def tokens(self, lease: LeaseId, tokens: Sequence[int], logprobs: Sequence[float], version: Version) -> None:
        self._hear(lease)
        if not 0 < len(tokens) == len(logprobs):
            self.problems.append(f"lease {lease}: {len(tokens)} tokens with {len(logprobs)} log-probabilities")
        if any(token < 0 for token in tokens) or not all(-math.inf < one <= MAX_LOGPROB for one in logprobs):
            self.problems.append(f"lease {lease}: {list(tokens)} {list(logprobs)} cannot be")
        self.texts.setdefault(lease, []).extend(tokens)
        self.logprobs.setdefault(lease, []).extend(logprobs)
        self.versions.setdefault(lease, []).extend([version] * len(tokens))

    def ended(self, lease: LeaseId, reason: EngineEnd, detail: str = "") -> None:
        self._hear(lease)
        self.ends[lease] = (reason, detail)

    def _hear(self, lease: LeaseId) -> None:
        if lease in self.ends:
            self.problems.append(f"lease {lease}: news after its end")
        if threading.get_ident() != self._thread:
            self.problems.append(f"lease {lease}: told on another thread than the event loop's")
        self.num_calls += 1
        self._heard.set()

    async def until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._heard.clear()
            await self._heard.wait()

    async def end_of(self, lease: LeaseId) -> EngineEnd:
        await self.until(lambda: lease in self.ends)
        return self.ends[lease][0]

    async def some_of(self, lease: LeaseId) -> None:
        """Wait for the first tokens of a lease."""
        await self.until(lambda: bool(self.texts.get(lease)))


class Stage:
    """A started engine, its sink, and short ways to ask it."""

    def __init__(self, engine: Engine, sink: RecordingSink, info: EngineInfo, prompt: list[int]) -> None:
        self.engine, self.sink, self.info = engine, sink, info
        self._prompt = prompt

    def begin(
        self,
        *,
        prompt: list[int] | None = None,
        so_far: Sequence[int] = (),
        max_tokens: int = 16,
        seed: int = 1,
        sampling: Sampling | None = None,
    ) -> LeaseId:
        lease = LeaseId(next(_leases))
        prompt = self._prompt if prompt is None else prompt
        sampling = Sampling() if sampling is None else sampling
        self.engine.generate(Job(lease, SampleId(1), prompt, list(so_far), max_tokens, seed, sampling))
        return lease

    async def text(self, **job: Any) -> list[int]:
        """Return the tokens of a job that is waited for."""
        lease = self.begin(**job)
        assert await self.sink.end_of(lease) in ("stop", "length")
        return self.sink.texts[lease]


Script = Callable[[Stage], Awaitable[None]]
ON = Sampling(ignore_eos=True)


class EngineContract:
    """Subclass it and say how an engine is made."""

    prompt: ClassVar = [5, 6, 7, 8]
    long_tokens = 2000
    """An answer that takes long enough to be stopped while it runs."""
    silence_s = 0.1
    """How long to listen before concluding that nothing comes."""
    patience_s = 60.0

    def engine(self) -> Engine:
        """Return a new one, not started."""
        pytest.fail(f"{type(self).__name__}.engine: missing, expected a method that makes an engine")

    def weights(self, version: int) -> Weights:
        return Weights(Version(version))

    @asynccontextmanager
    async def on_stage(self, engine: Engine | None = None) -> AsyncIterator[Stage]:
        """Start an engine with weights."""
        engine = self.engine() if engine is None else engine
        sink = RecordingSink()
        try:
            info = await engine.start(sink)
            if info.version is None:
                await engine.install(self.weights(1))
            yield Stage(engine, sink, info, self.prompt)
        finally:
            await engine.close()
        assert sink.problems == []

    def play(self, script: Script, engine: Engine | None = None) -> None:
        async def main() -> None:
            async with asyncio.timeout(self.patience_s), self.on_stage(engine) as stage:
                await script(stage)

        asyncio.run(main())

    def test_it_says_what_it_is_and_is_well_and_idle(self) -> None:
        async def script(stage: Stage) -> None:
            assert stage.info.engine
            assert stage.info.slots >= 1
            assert stage.engine.health() is None
            stats = stage.engine.stats()
            assert (stats.num_running, stats.num_waiting, stats.slots) == (0, 0, stage.info.slots)
            assert 0 <= stats.kv_used <= 1

        self.play(script)

    def test_an_answer_ends_once_and_is_not_longer_than_asked_for(self) -> None:
        async def script(stage: Stage) -> None:
            leases = [stage.begin(seed=seed) for seed in range(8)]
            for lease in leases:
                reason = await stage.sink.end_of(lease)
                assert 1 <= len(stage.sink.texts[lease]) <= 16
                assert reason == "stop" or len(stage.sink.texts[lease]) == 16
            await asyncio.sleep(self.silence_s)  # the sink objects to news after an end

        self.play(script)

    def test_an_answer_that_nothing_stops_ends_at_max_tokens(self) -> None:
        async def script(stage: Stage) -> None:
            lease = stage.begin(sampling=ON)
            assert await stage.sink.end_of(lease) == "length"
            assert len(stage.sink.texts[lease]) == 16

        self.play(script)

    def test_max_tokens_counts_what_was_there_already(self) -> None:
        async def script(stage: Stage) -> None:
            lease = stage.begin(so_far=self.prompt, max_tokens=len(self.prompt) + 3, sampling=ON)
            assert await stage.sink.end_of(lease) == "length"
            assert len(stage.sink.texts[lease]) == 3

        self.play(script)

    def test_a_resumed_sample_goes_on_as_if_it_had_never_stopped_where_that_is_declared(self) -> None:
        async def script(stage: Stage) -> None:
            if not stage.info.capabilities.seeds_survive_moves:
                pytest.skip("seeds do not survive moves on this engine")
            whole = await stage.text(seed=7, sampling=ON)
            async with self.on_stage() as elsewhere:
                for cut in (1, 9, 15):
                    assert whole[:cut] + await elsewhere.text(seed=7, so_far=whole[:cut], sampling=ON) == whole

        self.play(script)

    def test_a_stop_id_ends_the_answer_and_is_its_last_token(self) -> None:
        async def script(stage: Stage) -> None:
            if not stage.info.capabilities.seeds_survive_moves:
                pytest.skip("what it will write is not known beforehand")
            whole = await stage.text(seed=7, sampling=ON)
            stop_id = whole[9]
            lease = stage.begin(seed=7, sampling=Sampling(ignore_eos=True, stop_ids=(stop_id,)))
            assert await stage.sink.end_of(lease) == "stop"
            assert stage.sink.texts[lease] == whole[: whole.index(stop_id) + 1]

        self.play(script)

    def test_more_samples_than_slots_all_end(self) -> None:
        async def script(stage: Stage) -> None:
            leases = [stage.begin(seed=seed) for seed in range(2 * stage.info.slots + 1)]
            assert stage.engine.stats().num_running <= stage.info.slots
            for lease in leases:
                assert await stage.sink.end_of(lease) in ("stop", "length")

        self.play(script)

    def test_what_is_aborted_is_heard_of_no_more_and_its_place_is_free(self) -> None:
        async def script(stage: Stage) -> None:
            leases = [stage.begin(max_tokens=self.long_tokens, sampling=ON) for _ in range(stage.info.slots)]
            await stage.sink.some_of(leases[0])
            for lease in leases:
                await stage.engine.abort(lease)
            num_calls = stage.sink.num_calls
            assert stage.engine.stats().num_running == 0
            await asyncio.sleep(self.silence_s)
            assert stage.sink.num_calls == num_calls
            assert not stage.sink.ends
            assert await stage.text()

        self.play(script)

    def test_an_abort_that_nobody_waits_for_any_more_frees_its_place_all_the_same(self) -> None:
        async def script(stage: Stage) -> None:
            leases = [stage.begin(max_tokens=self.long_tokens, sampling=ON) for _ in range(stage.info.slots)]
            await stage.sink.some_of(leases[0])
            aborts = [asyncio.create_task(stage.engine.abort(lease)) for lease in leases]
            await asyncio.sleep(0)
            for abort in aborts:
                abort.cancel()
            await asyncio.wait(aborts)
            while stage.engine.stats().num_running:
                await asyncio.sleep(0.01)
            num_calls = stage.sink.num_calls
            await asyncio.sleep(self.silence_s)
            assert stage.sink.num_calls == num_calls
            assert not stage.sink.ends
            assert await stage.text()

        self.play(script)

    def test_what_is_aborted_right_after_it_was_given_is_heard_of_no_more_even_if_it_would_be_refused(self) -> None:
        async def script(stage: Stage) -> None:
            for lease in (stage.begin(), stage.begin(prompt=[])):
                await stage.engine.abort(lease)
            num_calls = stage.sink.num_calls
            await asyncio.sleep(self.silence_s)
            assert stage.sink.num_calls == num_calls

        self.play(script)

    def test_an_abort_of_what_it_does_not_know_or_has_ended_does_nothing(self) -> None:
        async def script(stage: Stage) -> None:
            lease = stage.begin()
            await stage.sink.end_of(lease)
            await stage.engine.abort(lease)
            await stage.engine.abort(LeaseId(10**9))
            assert await stage.text()

        self.play(script)

    @pytest.mark.parametrize("max_tokens", [2, 1], ids=["nothing left", "less than nothing left"])
    def test_a_whole_answer_whose_end_was_not_heard_of_ends_at_once(self, max_tokens: int) -> None:
        async def script(stage: Stage) -> None:
            lease = stage.begin(so_far=[5, 6], max_tokens=max_tokens, sampling=ON)
            assert await stage.sink.end_of(lease) == "length"
            assert lease not in stage.sink.texts

        self.play(script)

    @pytest.mark.parametrize(
        "job",
        [
            {"prompt": []},
            {"prompt": [5, -1]},
            {"so_far": [5, -1]},
            {"max_tokens": 0},
        ],
        ids=["empty prompt", "negative id", "negative id so far", "no token wanted"],
    )
    def test_a_job_that_makes_no_sense_is_refused_with_a_line(self, job: dict[str, Any]) -> None:
        async def script(stage: Stage) -> None:
            lease = stage.begin(**job)
            assert await stage.sink.end_of(lease) == "refused"
            assert stage.sink.ends[lease][1]
            assert lease not in stage.sink.texts
            assert await stage.text()

        self.play(script)

    def test_stop_strings_are_refused_where_they_are_not_declared(self) -> None:
        async def script(stage: Stage) -> None:
            if stage.info.capabilities.stop_strings:
                pytest.skip("it takes stop strings")
            lease = stage.begin(sampling=Sampling(stop=("done",)))
            assert await stage.sink.end_of(lease) == "refused"

        self.play(script)

    def test_an_empty_stop_string_is_refused(self) -> None:
        async def script(stage: Stage) -> None:
            lease = stage.begin(sampling=Sampling(stop=("",)))
            assert await stage.sink.end_of(lease) == "refused"
            assert "a stop string is empty" in stage.sink.ends[lease][1]

        self.play(script)

    def test_after_an_install_tokens_carry_the_new_version_and_running_samples_fare_as_declared(self) -> None:
        async def script(stage: Stage) -> None:
            lease = stage.begin(max_tokens=self.long_tokens, sampling=ON)
            await stage.sink.some_of(lease)
            old = stage.sink.versions[lease][0]
            await stage.engine.install(self.weights(old + 1))
            if stage.info.capabilities.keeps_running_over_install:
                await stage.sink.until(lambda: stage.sink.versions[lease][-1] == old + 1)
                assert stage.sink.versions[lease] == sorted(stage.sink.versions[lease])
            else:
                assert await stage.sink.end_of(lease) == "engine_failed"
            after = stage.begin()
            await stage.sink.end_of(after)
            assert set(stage.sink.versions[after]) == {old + 1}

        self.play(script)

    def test_closing_silences_it_and_may_be_done_twice(self) -> None:
        async def script(stage: Stage) -> None:
            await stage.sink.some_of(stage.begin(max_tokens=self.long_tokens, sampling=ON))
            await stage.engine.close()
            num_calls = stage.sink.num_calls
            await stage.engine.close()
            await asyncio.sleep(self.silence_s)
            assert stage.sink.num_calls == num_calls
            assert stage.engine.health()

        self.play(script)

    def test_an_engine_that_never_started_can_be_closed(self) -> None:
        asyncio.run(self.engine().close())
