"""The builtin engine, when one thing comes in the middle of another: installs, aborts, closing, and what fails then."""

import asyncio
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tests.builtin.stage import config, engine
from tests.builtin.test_builtin_engine import PROMPT, RunnerEngine
from tests.builtin.tiny_models import save_tiny
from tests.weights.copies import copy_of

from polyrl.engines.builtin.runner import Runner
from polyrl.engines.builtin.steps import Drawn
from polyrl.engines.contract import ON, EngineContract, RecordingSink, Stage
from polyrl.engines.engine import EngineError, Weights
from polyrl.ids import Version


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny("qwen3", tmp_path_factory.mktemp("model"))


def play(script: Any, one: Any) -> None:
    EngineContract().play(script, one)


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: Any) -> None:
        raise error

    return fail


@pytest.mark.parametrize("is_cancelled", [False, True])
def test_installs_that_overlap_follow_each_other(folder, is_cancelled):
    """The second is a difference to the first, and not to what was there when it was asked for."""
    one: Any = engine(folder)

    async def script(_: Stage) -> None:
        state = {name: each.clone() for name, each in one._loaded.model.state_dict().items()}
        first = copy_of(state, 1)
        await one.install(Weights(Version(1), copy=first))
        names = [name for name in state if "down_proj" in name]
        copies = []
        for version, name in enumerate(names[:2], start=2):
            changed = copy_of({**state, name: state[name] + 1}, version)
            changed.base, changed.changed = first.manifest.digest, frozenset([name])
            copies.append(changed)
        waiting = asyncio.create_task(one.install(Weights(Version(2), copy=copies[0])))
        await asyncio.sleep(0)
        if is_cancelled:
            waiting.cancel()
        await one.install(Weights(Version(3), copy=copies[1]))
        await asyncio.gather(waiting, return_exceptions=True)
        now = one._loaded.model.state_dict()
        assert torch.equal(now[names[0]], state[names[0]])
        assert torch.equal(now[names[1]], state[names[1]] + 1)

    play(script, one)


def test_weights_that_were_not_written_whole_are_not_used(folder):
    one: Any = engine(folder)

    def write() -> None:
        one._loaded.model.model.embed_tokens.weight.data.mul_(-1)
        raise RuntimeError("the writer broke off")

    async def script(stage: Stage) -> None:
        lease = stage.begin(prompt=PROMPT, max_tokens=400, sampling=ON)
        await stage.sink.some_of(lease)
        said = "version 1 was not written whole: RuntimeError: the writer broke off"
        with pytest.raises(EngineError, match=said):
            await one.install(Weights(Version(1), in_place=True, write=write))
        assert await stage.sink.end_of(lease) == "engine_failed"
        assert one.health() == said
        assert await stage.sink.end_of(stage.begin(prompt=PROMPT)) == "engine_failed"
        with pytest.raises(EngineError, match=said):
            await one.install(Weights(Version(2), in_place=True))

    play(script, one)


class SlowRunner(Runner):
    """As on a GPU, a burst may be long: its steps take 5 ms each, and two are on their way."""

    shows_bursts = True
    num_closed = 0

    def run(self, chunks, wanted):
        time.sleep(0.05)
        return super().run(chunks, wanted)

    def run_burst(self, chunks, wanted, num_steps, interrupted=None, look=None):
        assert interrupted is not None
        steps = []
        while len(steps) < num_steps and not (len(steps) >= 2 and interrupted.is_set()):
            time.sleep(0.005)
            steps.append(Drawn([9] * len(chunks), [-1.0] * len(chunks)))
        return steps

    def close(self) -> None:
        self.num_closed += 1
        super().close()


def test_an_abort_that_came_during_an_install_does_not_wait_for_a_burst(folder):
    one = RunnerEngine(config(folder, slots=2, kv_tokens=2048, after_install="keep"), SlowRunner)

    async def script(stage: Stage) -> None:
        leases = [stage.begin(prompt=PROMPT, max_tokens=490, sampling=ON) for _ in range(2)]
        await stage.sink.some_of(leases[1])
        holding = Weights(Version(1), in_place=True, write=lambda: time.sleep(0.2))
        install = asyncio.create_task(one.install(holding))
        await asyncio.sleep(0.1)  # the install is at it, and the next step waits for it
        abort = asyncio.create_task(one.abort(leases[0]))
        await install
        began = time.perf_counter()
        await abort
        assert time.perf_counter() - began < 0.2, "64 steps would be 0.32 s"

    play(script, one)


def test_closing_frees_the_cache_also_when_who_waits_for_it_is_cancelled(folder):
    one = RunnerEngine(config(folder), SlowRunner)

    async def script() -> None:
        sink = RecordingSink()
        stage = Stage(one, sink, await one.start(sink), PROMPT)
        stage.begin(max_tokens=500, sampling=ON)
        await asyncio.sleep(0.02)
        runner = one._runner
        closing = asyncio.create_task(one.close())
        await asyncio.sleep(0.01)
        closing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await closing
        assert isinstance(runner, SlowRunner)
        assert runner.num_closed == 1
        await one.close()
        assert runner.num_closed == 1

    asyncio.run(script())


def test_who_could_not_wake_is_still_asleep(folder, monkeypatch):
    one: Any = engine(folder)

    async def script(stage: Stage) -> None:
        expected = await stage.text(max_tokens=20, sampling=ON)
        await one.sleep()
        with monkeypatch.context() as patch:
            patch.setattr("polyrl.engines.builtin.decoder.Decoder.pack", failing(MemoryError()))
            with pytest.raises(MemoryError):
                await one.wake()
        await one.wake()
        assert await stage.text(max_tokens=20, sampling=ON) == expected

    play(script, one)


def test_an_install_that_was_under_way_when_a_step_failed_is_refused(folder, monkeypatch):
    one: Any = engine(folder)

    async def script(stage: Stage) -> None:
        copy = copy_of(dict(one._loaded.model.state_dict()), 1)
        stage_it = one._installer.stage

        def slow(weights: Weights) -> Any:
            time.sleep(0.3)
            return stage_it(weights)

        monkeypatch.setattr(one._installer, "stage", slow)
        install = asyncio.create_task(one.install(Weights(Version(1), copy=copy)))
        monkeypatch.setattr(one._runner, "run", failing(IndexError()))
        assert await stage.sink.end_of(stage.begin(prompt=PROMPT)) == "engine_failed"
        with pytest.raises(EngineError, match="a step failed"):
            await install

    play(script, one)


def test_on_the_cpu_batch_invariance_costs_nothing(folder):
    """What was decoded is found again, as ever."""
    one: Any = engine(folder, block_tokens=4, batch_invariant=True)
    num_rows: list[int] = []

    async def script(stage: Stage) -> None:
        answer = await stage.text(prompt=PROMPT, max_tokens=40, sampling=ON)
        run = one._runner.run

        def counting(chunks, wanted):
            num_rows.append(sum(chunk.count for chunk in chunks))
            return run(chunks, wanted)

        one._runner.run = counting
        await stage.text(prompt=PROMPT, so_far=answer[:38], max_tokens=40, sampling=ON)
        assert num_rows[0] < 12, "and not the whole of the answer so far"

    play(script, one)
