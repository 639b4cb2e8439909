"""Whose turn it is on the trainer's devices."""

import asyncio
import threading
import time

from polyrl.trainer.devices import Devices


class Engine:
    def __init__(self) -> None:
        self.said: list[str] = []

    async def sleep(self) -> None:
        self.said.append("sleeps")

    async def wake(self) -> None:
        self.said.append("wakes")


def test_without_an_engine_it_is_always_trainings_turn():
    async def scenario() -> None:
        devices = Devices()
        assert await devices.train(lambda: 7) == 7
        await devices.set_duty("generating")
        assert await devices.train(lambda: 8) == 8
        devices.close()

    asyncio.run(scenario())


class SlowWork:
    """On a device: it says that it has started, and ends when it is told to."""

    def __init__(self, engine: Engine, word: str) -> None:
        self._engine, self._word = engine, word
        self.started, self.goes_on = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.started.set()
        self.goes_on.wait(5.0)
        self._engine.said.append(self._word)


def test_training_waits_until_the_engine_sleeps():
    async def scenario() -> None:
        engine = Engine()
        devices = Devices(engine)
        work = asyncio.create_task(devices.train(lambda: engine.said.append("trains")))
        await asyncio.sleep(0.01)
        assert engine.said == []
        await devices.set_duty("training")
        await work
        assert engine.said == ["sleeps", "trains"]
        devices.close()

    asyncio.run(scenario())


def test_the_engine_wakes_only_when_the_work_that_runs_has_ended():
    async def scenario() -> None:
        engine = Engine()
        work = SlowWork(engine, "trained")
        devices = Devices(engine)
        await devices.set_duty("training")

        working = asyncio.create_task(devices.train(work))
        while not work.started.is_set():
            await asyncio.sleep(0.001)
        turning = asyncio.create_task(devices.set_duty("generating"))
        waiting = asyncio.create_task(devices.train(lambda: engine.said.append("trains again")))
        await asyncio.sleep(0.01)
        assert not turning.done()
        work.goes_on.set()
        await working
        await turning
        await asyncio.sleep(0.01)
        assert engine.said == ["sleeps", "trained", "wakes"]
        await devices.set_duty("training")
        await waiting
        assert engine.said[-2:] == ["sleeps", "trains again"]
        devices.close()

    asyncio.run(scenario())


def test_work_that_fails_gives_the_devices_back():
    async def scenario() -> None:
        devices = Devices(Engine())
        await devices.set_duty("training")
        try:
            await devices.train(lambda: 1 / 0)
        except ZeroDivisionError:
            pass
        else:
            raise AssertionError
        await devices.set_duty("generating")
        assert devices.duty == "generating"
        devices.close()

    asyncio.run(scenario())


def test_weights_that_move_keep_the_engine_asleep_until_they_have_their_name():
    async def scenario() -> None:
        engine = Engine()
        devices = Devices(engine)
        await devices.set_duty("training")
        async with devices.held():
            await devices.run(lambda: engine.said.append("updates"))
            turning = asyncio.create_task(devices.set_duty("generating"))
            await asyncio.sleep(0.01)
            engine.said.append("publishes")
        await turning
        assert engine.said == ["sleeps", "updates", "publishes", "wakes"]
        devices.close()

    asyncio.run(scenario())


def test_a_step_that_is_cancelled_ends_its_work_and_wakes_no_engine_to_weights_without_a_name():
    async def scenario() -> None:
        engine = Engine()
        move_weights = SlowWork(engine, "moved")
        devices = Devices(engine)
        await devices.set_duty("training")

        async def step() -> None:
            async with devices.held():
                await devices.run(move_weights)
                engine.said.append("publishes")

        stepping = asyncio.create_task(step())
        await asyncio.to_thread(move_weights.started.wait, 5.0)
        turning = asyncio.create_task(devices.set_duty("generating"))
        for _ in range(2):  # somebody is impatient
            stepping.cancel()
            await asyncio.sleep(0.01)
        assert not stepping.done()
        move_weights.goes_on.set()
        await asyncio.wait((stepping,))
        assert stepping.cancelled()
        await asyncio.sleep(0.01)
        assert engine.said == ["sleeps", "moved"]
        assert not turning.done()
        turning.cancel()
        devices.close()

    asyncio.run(scenario())


def test_gradients_that_are_cancelled_end_before_the_engine_wakes():
    async def scenario() -> None:
        engine = Engine()
        work = SlowWork(engine, "ended")
        devices = Devices(engine)
        await devices.set_duty("training")

        working = asyncio.create_task(devices.train(work))
        await asyncio.to_thread(work.started.wait, 5.0)
        turning = asyncio.create_task(devices.set_duty("generating"))
        working.cancel()
        await asyncio.sleep(0.01)
        work.goes_on.set()
        await turning
        assert working.cancelled()
        assert engine.said == ["sleeps", "ended", "wakes"]
        devices.close()

    asyncio.run(scenario())


def test_a_turn_that_comes_while_it_validates_is_answered_and_the_engine_sleeps_afterwards():
    async def scenario() -> None:
        engine = Engine()
        devices = Devices(engine)
        async with devices.for_validation():
            await devices.set_duty("training")
            assert engine.said == ["wakes"]
        assert engine.said == ["wakes", "sleeps"]
        assert await devices.train(lambda: 7) == 7
        async with devices.for_validation():
            await devices.set_duty("generating")
        assert engine.said[2:] == ["wakes", "wakes"]
        devices.close()

    asyncio.run(scenario())


def test_an_engine_for_validation_alone_leaves_every_turn_to_training():
    async def scenario() -> None:
        engine = Engine()
        devices = Devices(engine, generates=False)
        async with devices.for_validation():
            pass
        assert engine.said == ["wakes", "sleeps"]
        assert await devices.train(lambda: 7) == 7
        devices.close()

    asyncio.run(scenario())


def test_training_s_turn_is_measured_and_what_it_did_not_train_of_it_it_was_idle():
    async def scenario() -> None:
        devices = Devices(Engine())
        await asyncio.sleep(0.02)
        assert devices.training.seconds == 0.0
        began = time.monotonic()
        await devices.set_duty("training")
        await devices.set_duty("training")  # said twice
        await devices.train(lambda: time.sleep(0.02))
        await asyncio.sleep(0.02)
        await devices.set_duty("generating")
        ended = time.monotonic()
        await asyncio.sleep(0.02)
        assert 0.02 <= devices.training.seconds - devices.trained_s <= devices.training.seconds <= ended - began
        assert devices.trained_s >= 0.02
        devices.close()

    asyncio.run(scenario())
