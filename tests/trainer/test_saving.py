"""Making a run safe beside it: when checkpoints are written, what waits for what, and what becomes of a full disk."""

import asyncio
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.trainer.small import draw_groups

from polyrl.errors import UserError
from polyrl.run.checkpoints import ResumePoint, train_again
from polyrl.telemetry import validated
from polyrl.telemetry.metrics import MetricsFile
from polyrl.trainer.state import checkpoint, redo
from polyrl.trainer.state.checkpoint import Keep, TrainerState
from polyrl.trainer.state.saving import Rules, Saver, Snapshot
from polyrl.trainer.step_stats import Added, StepStats

GROUPS = [draw_groups(1)]
METRIC = "validation/pass@1"


class Model:
    """All of its numbers are how many steps it was trained."""

    def __init__(self, run_dir: Path, rules: Rules, **options: Any) -> None:
        self.weights = {"policy/master/a": torch.zeros(8), "policy/updates/a": torch.tensor(0.0)}
        options = {"newest": 0, "num_steps": 100, **options}
        self.run_dir = run_dir
        self.saver = Saver(run_dir, TrainerState(next_step=options["newest"]), rules, self.gather, **options)

    def gather(self) -> Iterator[tuple[str, torch.Tensor]]:
        yield from self.weights.items()

    async def step(self, step: int) -> None:
        self.begin(step)
        self.finish()
        await self.saver.trained(step, GROUPS)

    def begin(self, step: int, num_steps: int | None = None) -> None:
        self._step = step

    def add(self, groups: Any, first: int | None = None) -> Added:
        return Added(len(groups))

    def finish(self, *, may_be_void: bool = False) -> StepStats:
        for one in self.weights.values():
            one.fill_(self._step + 1)
        return StepStats(self._step, Added(), {})

    device_type = "cpu"

    def steps_on_disk(self) -> list[int]:
        return [checkpoint.step_of(one) for one in checkpoint.found(self.run_dir)]


def play(scenario: Callable[[], Coroutine[Any, Any, None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(20):
            await scenario()

    asyncio.run(bounded())


@pytest.mark.parametrize(
    ("rules", "due", "asked_for"),
    [
        (Rules(10, Keep()), [10, 20, 30], []),
        (Rules(10, Keep(2, 4)), [10, 20, 30], [4, 8, 12, 16, 20, 24, 28]),
        (Rules(10, Keep(), 5), [10, 20, 30], [0, 5, 10, 15, 20, 25, 30]),
    ],
)
def test_the_rules(rules: Rules, due: list[int], asked_for: list[int]):
    assert [step for step in range(31) if rules.is_due(step, max(0, step - 1) // 10 * 10)] == due
    assert [step for step in range(31) if rules.is_asked_for(step)] == asked_for


def test_every_step_is_in_the_log_and_every_third_has_a_checkpoint(tmp_path: Path):
    async def scenario() -> None:
        model = Model(tmp_path, Rules(3, Keep(2)))
        await model.saver.begin()
        assert model.steps_on_disk() == [0]
        for step in range(8):
            await model.step(step)
            await model.saver._written()
            newest = model.steps_on_disk()[-1]
            assert newest == (step + 1) // 3 * 3
            assert newest + len(redo.read(tmp_path, newest)) == step + 1
        await model.saver.finish()
        assert model.steps_on_disk() == [6, 8]
        state, tensors = checkpoint.load(checkpoint.found(tmp_path)[-1])
        assert state.next_step == 8 and all(bool((one == 8).all()) for one in tensors.values())
        assert [one.step for one in redo.read(tmp_path, 6)] == [6, 7], "one of the two may be damaged"
        assert not redo.has(tmp_path, 5)

    play(scenario)


def test_with_one_checkpoint_kept_the_log_begins_at_it(tmp_path: Path):
    async def scenario() -> None:
        model = Model(tmp_path, Rules(2, Keep(1)))
        for step in range(4):
            await model.step(step)
        await model.saver.finish()
        assert model.steps_on_disk() == [4] and redo.num_after(tmp_path, 4) == 0
        assert redo.num_after(tmp_path, 0) == 1, "what is to be told of the last step is in its entry"

    play(scenario)


def test_a_copy_is_of_its_moment_whatever_happens_to_the_model_afterwards():
    weights = {"a": torch.ones(3)}
    snapshot = Snapshot()
    snapshot.take(weights.items())
    weights["a"].fill_(2.0)
    assert snapshot.tensors["a"].tolist() == [1.0, 1.0, 1.0]
    memory = snapshot.tensors["a"].data_ptr()
    snapshot.take(weights.items())
    assert snapshot.tensors["a"].tolist() == [2.0, 2.0, 2.0] and snapshot.tensors["a"].data_ptr() == memory


class SlowDisk:
    """Holds whoever writes a checkpoint until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.written: list[int] = []

    def write(self, run_dir: Path, state: TrainerState, tensors: Any, *, stop: threading.Event) -> None:
        while not self.opened.wait(0.01) and not stop.is_set():
            pass
        self.written.append(state.next_step)
        checkpoint.save(run_dir, state, tensors, stop=stop)


def test_training_goes_on_while_a_checkpoint_is_written_and_the_next_is_of_the_newest_step(tmp_path: Path):
    async def scenario() -> None:
        disk = SlowDisk()
        model = Model(tmp_path, Rules(2, Keep(2)), write=disk.write)
        for step in range(7):
            await model.step(step)  # the first is due after step 1, others after 3 and 5
        assert model.steps_on_disk() == [] and [one.step for one in redo.read(tmp_path, 0)] == list(range(7))
        disk.opened.set()
        while not model.steps_on_disk():
            await asyncio.sleep(0.01)
        state, tensors = checkpoint.load(checkpoint.found(tmp_path)[-1])
        assert state.next_step == 2 and tensors["policy/master/a"].tolist() == [2.0] * 8
        await model.saver._written()
        await model.step(7)
        await model.saver.finish()
        assert disk.written == [2, 8]

    play(scenario)


def test_a_step_that_is_to_be_kept_waits_for_the_one_before_it(tmp_path: Path):
    async def scenario() -> None:
        disk = SlowDisk()
        model = Model(tmp_path, Rules(2, Keep(1, 3)), write=disk.write)
        await model.step(0)
        await model.step(1)
        waiting = asyncio.create_task(model.step(2))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        disk.opened.set()
        await waiting
        await model.saver.finish()
        assert disk.written == [2, 3]

    play(scenario)


def test_what_is_being_written_is_broken_off_when_the_run_is_interrupted(tmp_path: Path):
    async def scenario() -> None:
        model = Model(tmp_path, Rules(1, Keep(1)), write=SlowDisk().write)
        await model.step(0)
        await model.saver.stop()
        assert model.steps_on_disk() == [] and redo.num_after(tmp_path, 0) == 1
        assert not list((tmp_path / checkpoint.FOLDER).glob(".step-*"))

    play(scenario)


def no_room(*_: Any, **__: Any) -> None:
    raise OSError(28, "No space left on device")


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_a_line(tmp_path: Path):
    async def scenario() -> None:
        model = Model(tmp_path, Rules(2, Keep(2)), write=no_room)
        await model.saver.begin()
        watching = asyncio.create_task(model.saver.failed())
        for step in range(2):
            await model.step(step)
        line = f"^{tmp_path}: the checkpoint of step 2 cannot be written: No space left on device; the last checkpoint "
        with pytest.raises(UserError, match=line):
            await watching
        with pytest.raises(UserError, match=line):
            await model.step(2)
        with pytest.raises(UserError, match=line):
            await model.saver.finish()
        await model.saver.stop()
        assert model.steps_on_disk() == [0] and [one.step for one in redo.read(tmp_path, 0)] == [0, 1, 2]

    play(scenario)


def test_whatever_else_goes_wrong_there_does_not_vanish(tmp_path: Path):
    async def scenario() -> None:
        def broken(*_: Any, **__: Any) -> None:
            raise KeyError("a kind of tensor that nobody knows")

        model = Model(tmp_path, Rules(1, Keep(2)), write=broken)
        await model.step(0)
        with pytest.raises(KeyError):
            await model.saver.failed()

    play(scenario)


def test_a_step_that_cannot_be_logged_ends_the_run_with_a_line(tmp_path: Path):
    async def scenario() -> None:
        model = Model(tmp_path, Rules(9, Keep(2)))
        await model.saver.begin()
        await model.step(0)
        (tmp_path / checkpoint.FOLDER / "redo" / ".step-000001").symlink_to("/dev/full")
        (tmp_path / checkpoint.FOLDER / ".published.json").symlink_to("/dev/full")
        with pytest.raises(
            UserError, match=f"^{tmp_path}: what step 1 was trained on cannot be written: No space left"
        ):
            await model.step(1)
        with pytest.raises(UserError, match=f"^{tmp_path}: the digest of version 1 cannot be written: No space left"):
            await model.saver.offered(1, "ab")
        assert [one.step for one in redo.read(tmp_path, 0)] == [0]

    play(scenario)


def test_a_version_is_known_by_all_digests_that_it_had(tmp_path: Path):
    async def scenario() -> None:
        model = Model(tmp_path, Rules(9, Keep(2)), digests_kept=3)
        await model.saver.begin()
        for version in range(5):
            assert not await model.saver.offered(version, f"{version}{version}")
        again = Model(tmp_path, Rules(9, Keep(2)), digests_kept=3)
        assert not await again.saver.offered(4, "44")
        assert await again.saver.offered(4, "ab")
        assert checkpoint.read_published(tmp_path) == {2: ("22",), 3: ("33",), 4: ("44", "ab")}

    play(scenario)


def test_the_best_is_noted_when_its_checkpoint_is_on_disk_and_not_before(tmp_path: Path):
    async def scenario() -> None:
        disk = SlowDisk()
        disk.opened.set()
        model = Model(tmp_path, Rules(100, Keep(1), 2), metric="m", write=disk.write)
        await model.saver.begin()
        model.saver.validated(0, {"m": 0.1})
        best = checkpoint.read_best(tmp_path)
        assert best is not None and best.step == 0
        disk.opened.clear()
        await model.step(0)
        await model.step(1)
        model.saver.validated(2, {"m": 0.7, "other": 1.0})
        best = checkpoint.read_best(tmp_path)
        assert best is not None and best.step == 0
        disk.opened.set()
        await model.saver.finish()
        best = checkpoint.read_best(tmp_path)
        assert best is not None and (best.step, best.value) == (2, 0.7)

    play(scenario)


@pytest.mark.parametrize(
    ("newest", "best", "is_told"),
    [(0, 2, True), (2, 2, True), (2, 4, True), (2, 4, False)],
    ids=["before it is on disk", "before it is noted", "the last one", "before anyone is told how it validated"],
)
def test_checkpoints_that_were_asked_for_and_not_written_are_made_up_for_and_so_is_the_best(
    tmp_path: Path, newest: int, best: int, *, is_told: bool
):
    """Killed before the first or the second of them was whole; both versions had validated."""

    async def scenario() -> None:
        killed = Model(tmp_path, Rules(100, Keep(1, 2), 2), metric=METRIC)
        await killed.saver.begin()
        for step in range(newest):
            await killed.step(step)
        await killed.saver._written()
        file = MetricsFile(tmp_path / "metrics.jsonl")
        for step in range(5):
            rates = {METRIC: 0.7 if step == best else 0.3} if step in (2, 4) else {}
            if rates:
                validated.note(tmp_path, step, rates)
            if is_told or step < 4:
                file.log(step, {"reward/mean": 0.5, **rates})
            if step >= newest:
                redo.append(tmp_path, step, 100, GROUPS)
        file.close()
        assert checkpoint.read_best(tmp_path) is None

        state, tensors = checkpoint.load(checkpoint.found(tmp_path)[-1])
        past = ResumePoint(checkpoint.found(tmp_path)[-1], state, tensors, redo.read(tmp_path, state.next_step), {}, 0)
        again = Model(tmp_path, Rules(100, Keep(1, 2), 2), metric=METRIC, newest=newest)
        await train_again(past, again, again.saver, tmp_path)
        await again.saver.finish()
        assert again.steps_on_disk() == [2, 4, 5]
        for folder in checkpoint.found(tmp_path):
            state, tensors = checkpoint.load(folder)
            assert state.next_step == checkpoint.step_of(folder)
            assert all(bool((one == state.next_step).all()) for one in tensors.values())
        noted = checkpoint.read_best(tmp_path)
        assert noted is not None and (noted.step, noted.value) == (best, 0.7)

    play(scenario)


def test_what_a_killed_process_had_no_time_to_let_go_of_goes_when_the_run_ends(tmp_path: Path):
    async def scenario() -> None:
        for step in (0, 2, 4):  # the last was renamed, and nothing after that
            checkpoint.save(tmp_path, TrainerState(next_step=step), {"a": torch.zeros(1)})
        for step in range(4):
            redo.append(tmp_path, step, 4, GROUPS)
        model = Model(tmp_path, Rules(2, Keep(1)), newest=4, num_steps=4)
        await model.saver.finish()
        assert model.steps_on_disk() == [4] and [redo.has(tmp_path, step) for step in range(4)] == [False] * 3 + [True]

    play(scenario)


def test_the_best_of_before_goes_when_the_last_is_better(tmp_path: Path):
    async def scenario() -> None:
        model = Model(tmp_path, Rules(100, Keep(1), 1), metric="m")
        for step, value in enumerate((0.1, 0.2)):
            await model.step(step)
            await model.saver._written()
            model.saver.validated(step + 1, {"m": value})
        assert model.steps_on_disk() == [1, 2]
        await model.saver.finish()
        assert model.steps_on_disk() == [2]

    play(scenario)
