"""The processes of a run whose model is trained by several ranks: started, told what to train, watched, and ended.

    polyrl train recipe.toml train.ranks=4                      this process is rank zero, and starts the others
    torchrun --nproc-per-node 4 -m polyrl train recipe.toml     torchrun has started all four

Rank zero reads the recipe, the data and the checkpoint's place, and runs everything but the model; the others are told.
Rules kept here: no rank outlives rank zero. Ctrl+C is rank zero's to hear. A rank that ends before it is told to ends
the run, with a line that says which one and why; its log is RUN/logs/rank-N.log.
"""

import asyncio
import logging
import os
import shlex
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec import Struct

from polyrl.config.plugins import look_in
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError, one_line
from polyrl.run import processes
from polyrl.run.event_loop import run_loop

if TYPE_CHECKING:
    from polyrl.trainer.leading import Leader, Learner
    from polyrl.trainer.ranks import RankInfo, Ranks
    from polyrl.trainer.replicas import FarReplica

log = logging.getLogger("polyrl.train")

_RANK_INFO = "POLYRL_RANK"
"""RANK/SIZE:FILE, for a rank that rank zero has started."""
_TORCHRUN = "TORCHELASTIC_RUN_ID"
_LOOK_EVERY_S = 0.2
_DEATH_IS_SEEN_S = 3.0
"""A connection may be known to be closed before its process is known to have ended."""
_GRACE_S = 10.0


class RankSetup(Struct, frozen=True):
    """The first message from rank zero to the other ranks."""

    recipe: Recipe
    run_dir: str
    checkpoint: str | None
    """The checkpoint that the run resumes from."""


def rank_info(environment: Mapping[str, str]) -> "RankInfo | None":
    """Return this process's rank; None if it is the only one, or starts the others. Raises UserError."""
    from polyrl.trainer.ranks import RankInfo

    if _RANK_INFO in environment:
        numbers, _, meeting_point = environment[_RANK_INFO].partition(":")
        rank, _, size = numbers.partition("/")
        return RankInfo(int(rank), int(size), meeting_point)
    if _TORCHRUN not in environment or environment["WORLD_SIZE"] == "1":
        return None
    if environment["LOCAL_WORLD_SIZE"] != environment["WORLD_SIZE"]:
        raise UserError(
            f"torchrun: {environment['WORLD_SIZE']} ranks on several machines; expected all on one machine: "
            "more machines take part as workers, see docs/guides/ranks.md"
        )
    return RankInfo(int(environment["RANK"]), int(environment["WORLD_SIZE"]))


def with_ranks(read: Callable[[list[str]], Recipe], overrides: list[str], info: "RankInfo | None") -> Recipe:
    """Read the recipe with these overrides, and with train.ranks set to the number of ranks that torchrun started.

    Defaults that depend on the number of ranks follow it. Raises UserError if the recipe has another number.
    """
    recipe = read(overrides)
    if info is None or recipe.train.ranks == info.size:
        return recipe
    if recipe.train.ranks != 1:
        raise UserError(
            f"train.ranks: {recipe.train.ranks}, and torchrun has started {info.size}; leave one of them out"
        )
    return read([*overrides, f"train.ranks={info.size}"])


class OtherRanks:
    """The other ranks, as rank zero sees them. `started` are those that it started itself, from rank one on."""

    def __init__(self, ranks: "Ranks", run_dir: Path, started: "list[subprocess.Popen[bytes]]") -> None:
        self.ranks = ranks
        self._run_dir, self._started = run_dir, started
        self._leader: Leader | None = None
        self._is_led = False
        self._far: list[FarReplica] = []

    def check(self) -> None:
        """Raises UserError when a rank has ended: nobody watches them before the run begins."""
        if (why := _ended(self._run_dir, self._started)) is not None:
            raise UserError(why)

    def lead(self, learner: "Learner") -> "Leader | None":
        """Lead the ranks that share rank zero's copy of the model; None if it has one to itself."""
        from polyrl.trainer.leading import Leader

        self._is_led = True
        if self.ranks.replica.size > 1:
            self._leader = Leader(self.ranks.replica, learner, self._lost)
        return self._leader

    def far_replicas(self) -> "list[FarReplica]":
        """The other replicas, each as its first rank."""
        from polyrl.run import local_worker
        from polyrl.trainer.replicas import FarReplica

        if not self._far:
            lines = self.ranks.lines
            self._far = [FarReplica(lines[at], local_worker.name_of(at), self._lost) for at in sorted(lines)]
        return self._far

    def _lost(self, error: RuntimeError) -> str | None:
        return _lost(error, self._run_dir, self._started)

    async def failed(self) -> None:
        """Waits for as long as all is well; raises UserError when a rank has ended."""
        while (why := _ended(self._run_dir, self._started)) is None:
            await asyncio.sleep(_LOOK_EVERY_S)
        self.ranks.break_off()
        raise UserError(why)

    def close(self) -> None:
        """Tell the others to stop; end those that do not hear it."""
        until = time.monotonic() + _GRACE_S
        for one in self._far:
            one.stop(max(0.0, until - time.monotonic()))
        if self._leader is not None:
            self._leader.stop()
        for process in self._started:
            if not self._is_led:
                process.kill()
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                until = 0.0
                process.kill()
                process.wait()


@contextmanager
def assembled(
    recipe: Recipe, run_dir: Path, info: "RankInfo | None", checkpoint: Path | None
) -> Iterator[OtherRanks | None]:
    """All ranks of a run, told what it is; None where there is only this one."""
    if recipe.train.ranks == 1:
        yield None
        return
    from polyrl.engines.builtin.config import choose_device
    from polyrl.trainer.ranks import RankInfo, check_gpus

    device = choose_device(recipe.model.device)
    if device == "cuda":
        check_gpus(recipe.train.ranks)
    started: list[subprocess.Popen[bytes]] = []
    other_ranks: OtherRanks | None = None
    with tempfile.TemporaryDirectory(prefix="polyrl-ranks-") as folder:
        try:
            if info is None:
                info = RankInfo(0, recipe.train.ranks, f"{folder}/meeting-point")
                started += (_start(run_dir, info._replace(rank=rank)) for rank in range(1, info.size))
            ranks = _meet(info, run_dir, started)
            ranks.broadcast(msgspec.msgpack.encode(RankSetup(recipe, str(run_dir), checkpoint and str(checkpoint))))
            ranks.use(device, recipe.train.replicas)
            other_ranks = OtherRanks(ranks, run_dir, started)
            yield other_ranks
        except RuntimeError as error:
            if (why := _lost(error, run_dir, started)) is None:
                raise
            raise UserError(why) from error
        finally:
            if other_ranks is not None:
                other_ranks.close()
            for process in started:
                process.kill()
                process.wait()


def _meet(info: "RankInfo", run_dir: Path, started: "list[subprocess.Popen[bytes]]") -> "Ranks":
    """All ranks together. Raises UserError, at once when one that was started has ended.

    Nothing ends the wait for ranks that never come but time, ten minutes of it: so a thread waits.
    """
    from polyrl.trainer.ranks import Ranks

    meeting: Future[Ranks] = Future()

    def wait() -> None:
        try:
            meeting.set_result(Ranks.join(info))
        except Exception as error:  # noqa: BLE001  whoever waits is told of it
            meeting.set_exception(error)

    threading.Thread(target=wait, name="meeting the other ranks", daemon=True).start()
    while True:
        try:
            return meeting.result(_LOOK_EVERY_S)
        except TimeoutError:
            if (why := _ended(run_dir, started)) is not None:
                raise UserError(why) from None
        except RuntimeError as error:
            why = _lost(error, run_dir, started) or f"the ranks did not meet, see {run_dir / 'logs'}: {one_line(error)}"
            raise UserError(why) from error


def _lost(error: RuntimeError, run_dir: Path, started: "list[subprocess.Popen[bytes]]") -> str | None:
    """Return a line on the rank that ended, if that explains the error; otherwise None."""
    until = time.monotonic() + _DEATH_IS_SEEN_S
    while started and time.monotonic() < until:
        if (why := _ended(run_dir, started)) is not None:
            return why
        time.sleep(_LOOK_EVERY_S)
    if started or not any(word in str(error) for word in ("gloo", "NCCL", "onnection")):
        return None
    return f"another rank has ended: see {run_dir / 'logs'}; {_go_on(run_dir)}"


def _ended(run_dir: Path, started: "list[subprocess.Popen[bytes]]") -> str | None:
    """Return a line on the first rank that has ended; None if all are running."""
    for number, process in enumerate(started, 1):
        code = process.poll()
        if code is not None:
            return f"rank {number} {processes.show_end(code, log_file(run_dir, number))}; {_go_on(run_dir)}"
    return None


def _start(run_dir: Path, info: "RankInfo") -> "subprocess.Popen[bytes]":
    with log_file(run_dir, info.rank).open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "polyrl", "train"],
            stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            env={**os.environ, _RANK_INFO: f"{info.rank}/{info.size}:{info.meeting_point}"},
            start_new_session=True, preexec_fn=processes.terminate_with_parent,  # noqa: PLW1509  it takes no lock
        )  # fmt: skip


def follow(info: "RankInfo") -> int:
    """Run a rank other than zero. It logs its errors; rank zero reports them to the user."""
    from polyrl.engines.builtin.config import choose_device
    from polyrl.run import models, replica
    from polyrl.trainer import leading
    from polyrl.trainer.ranks import Ranks
    from polyrl.trainer.state import checkpoint

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not info.meeting_point:  # torchrun tells all to end at once; rank zero still needs the others while it does so
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ranks = Ranks.join(info)
    setup = msgspec.msgpack.decode(ranks.broadcast(), type=RankSetup)
    run_dir, recipe = Path(setup.run_dir), setup.recipe
    look_in(recipe.modules)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", filename=log_file(run_dir, info.rank))
    try:
        ranks.use(choose_device(recipe.model.device), recipe.train.replicas)
        learner = models.load_learner(recipe, ranks)
        tensors = {} if setup.checkpoint is None else checkpoint.load(Path(setup.checkpoint))[1]
        if tensors:
            learner.restore(tensors)
        log.info("rank %d of %d is ready, on %s", info.rank, info.size, ranks.device)
        if ranks.replica_number > 0 and ranks.replica.rank == 0:
            run_loop(replica.ReplicaProcess(recipe, ranks, learner).run())
        else:
            leading.follow(ranks.replica, learner)
    except UserError as error:
        log.error("%s", error)
        return 1
    except RuntimeError:
        log.exception("rank %d cannot go on", info.rank)
        return 1
    ranks.close()
    return 0


def log_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank}.log"


def _go_on(run_dir: Path) -> str:
    from polyrl.trainer.state import checkpoint

    if not checkpoint.found(run_dir):
        return "nothing is trained yet: the same command begins again"
    return f"go on with `polyrl train --resume {shlex.quote(str(run_dir))}`"
