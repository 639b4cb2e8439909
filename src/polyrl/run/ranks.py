"""The processes of a run whose model is trained by several ranks: started, told what to train, watched, and ended.

    polyrl train recipe.toml train.ranks=4                      this process is rank zero, and starts the others
    torchrun --nproc-per-node 4 -m polyrl train recipe.toml     torchrun has started all four

Rank zero reads the recipe, the data and the checkpoint's place, and runs everything but the model; the others are told.
Ranks may be on several nodes: torchrun starts them there, or nodes.py does.

Rules kept here: no rank outlives rank zero. Ctrl+C is rank zero's to hear. A rank that ends before it is told to stops
all of them, with a line that says which one and why; its log is RUN/logs/rank-N.log. Then the run goes on by itself
(going_on.py): what was trained is on disk, and the fleet was told nothing.
"""

import asyncio
import contextlib
import logging
import os
import shlex
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import Struct

from polyrl.config.plugins import look_in
from polyrl.config.recipe import Recipe
from polyrl.errors import RankLost, UserError, one_line
from polyrl.run import nodes, processes
from polyrl.run.event_loop import run_loop

if TYPE_CHECKING:
    from polyrl.run.rank_watch import RankWatch
    from polyrl.trainer.leading import Leader, Learner, RankShards
    from polyrl.trainer.ranks import NodeHeads, RankInfo, Ranks
    from polyrl.trainer.replicas import FarReplica

log = logging.getLogger("polyrl.train")

_LOOK_EVERY_S = 0.2
_DEATH_IS_SEEN_S = 3.0
"""A connection may be known to be closed before its process is known to have ended."""
_GRACE_S = 10.0
_EXIT_LOST_OTHERS = 75
"""The exit code of a rank that could not go on since another one was gone: it is not the one to name."""
_BROKEN = ("gloo", "NCCL", "onnection")
"""Words in errors of torch's about a connection between ranks."""


class RankSetup(Struct, frozen=True):
    """The first message from rank zero to the other ranks."""

    recipe: Recipe
    run_dir: str
    checkpoint: str | None
    """The checkpoint that the run resumes from."""
    watch_port: int = 0
    """Where rank zero watches the others, if they are on several nodes."""
    watch_key: bytes = b""


def rank_info(environment: Mapping[str, str]) -> "RankInfo | None":
    """Return this process's rank; None if it is the only one, or starts the others. Raises UserError."""
    from polyrl.trainer.ranks import RankInfo

    if nodes.RANK_INFO in environment:
        return msgspec.json.decode(environment[nodes.RANK_INFO], type=RankInfo)
    if nodes.TORCHRUN not in environment or environment["WORLD_SIZE"] == "1":
        return None
    rank, size, local_rank, local_size, node, num_nodes = (
        int(environment[name])
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE")
    )
    return RankInfo(rank, size, "", local_rank, local_size, node, num_nodes)


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
    """The other ranks, as rank zero sees them. `started` are those that it started itself, from rank one on; `watch`
    sees those on other nodes."""

    def __init__(
        self, ranks: "Ranks", run_dir: Path, started: "list[subprocess.Popen[bytes]]", watch: "RankWatch | None"
    ) -> None:
        self.ranks = ranks
        self._run_dir, self._started, self._watch = run_dir, started, watch
        self._leader: Leader | None = None
        self.shares_run_dir = False
        self._first_victim_at: float | None = None
        self._is_led = False
        self._far: list[FarReplica] = []

    def check(self) -> None:
        """Raises RankLost when a rank has ended: the ranks are not watched before the run begins."""
        if (lost := self._gone()) is not None:
            raise lost

    def lead(self, learner: "Learner") -> "Leader | None":
        """Lead the ranks that share rank zero's copy of the model; None if it has one to itself."""
        from polyrl.trainer.leading import Leader

        self._is_led = True
        if self.ranks.replica.size > 1:
            self._leader = Leader(self.ranks.replica, learner, self.why)
        return self._leader

    @property
    def heads(self) -> "NodeHeads | None":
        """The first ranks of all nodes; None if there is one node."""
        if self.ranks.heads is not None:
            self.ranks.heads.lost = self.why
        return self.ranks.heads

    def far_replicas(self) -> "list[FarReplica]":
        """Return the other replicas, each as its first rank."""
        from polyrl.run import local_worker
        from polyrl.trainer.replicas import FarReplica

        if not self._far:
            lines = self.ranks.lines
            size = self.ranks.replica.size
            serving = {rank // size for rank in self.ranks.first_ranks()}
            self._far = [
                FarReplica(lines[at], local_worker.name_of(at), self.why, serves=at in serving) for at in sorted(lines)
            ]
        return self._far

    def restore(self, learner: "Learner", folder: Path, tensors: Mapping[str, Any]) -> None:
        """Load a checkpoint at all ranks: the others do it as soon as they have loaded their models."""
        from polyrl.trainer.state import restoring

        restoring.restore(learner, self.ranks, folder, is_shared=self.shares_run_dir, tensors=tensors)

    @property
    def shards(self) -> "RankShards | None":
        """The writer of checkpoints where all ranks see the run's directory; None: rank zero gathers and writes."""
        from polyrl.trainer.leading import RankShards

        if not self.shares_run_dir or self._leader is None:
            return None
        return RankShards(self._leader, self._run_dir, self.ranks.replica.size)

    async def failed(self) -> None:
        """Waits for as long as all is well; raises RankLost when a rank has ended."""
        while (lost := self._gone()) is None:
            await asyncio.sleep(_LOOK_EVERY_S)
        await asyncio.to_thread(self._break_off)
        raise lost

    def why(self, error: RuntimeError) -> RankLost | None:
        """Return which rank has ended, if that explains the error; otherwise None."""
        return _lost(error, self._run_dir, self._started, self._gone)

    def _gone(self) -> RankLost | None:
        if (lost := _ended(self._run_dir, self._started)) is not None:
            return lost
        why = None if self._watch is None else self._watch.lost()
        if why is None and any(one.poll() == _EXIT_LOST_OTHERS for one in self._started):
            self._first_victim_at = self._first_victim_at or time.monotonic()
            if time.monotonic() > self._first_victim_at + _DEATH_IS_SEEN_S:
                why = f"a rank has lost its connection to another one, see {self._run_dir / 'logs'}"
        return None if why is None else RankLost(why, _go_on(self._run_dir))

    def _break_off(self) -> None:
        """End all ranks, so that no collective waits for one any longer."""
        self.ranks.break_off()
        if self._watch is not None:
            self._watch.close(is_over=False)
            self._watch = None
        for process in self._started:
            process.kill()

    def close(self) -> None:
        """Tell the others to stop; end those that do not hear it."""
        until = time.monotonic() + _GRACE_S
        if self._gone() is not None:
            self._break_off()
        else:
            for one in self._far:
                one.stop(max(0.0, until - time.monotonic()))
            if self._leader is not None:
                self._leader.stop()
        if self._watch is not None:
            self._watch.close(is_over=self._is_led)
        for process in self._started:
            if not self._is_led:
                process.kill()
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                until = 0.0
                process.kill()
                process.wait()


@contextlib.contextmanager
def assembled(
    recipe: Recipe, run_dir: Path, info: "RankInfo | None", checkpoint: Path | None
) -> Iterator[OtherRanks | None]:
    """Assemble all ranks of a run, told what it is; None where there is only this one."""
    if recipe.train.ranks == 1:
        yield None
        return
    from polyrl.engines.builtin.config import choose_device
    from polyrl.trainer.ranks import check_gpus
    from polyrl.trainer.state import sharded

    device = choose_device(recipe.model.device)
    started: list[subprocess.Popen[bytes]] = []
    other_ranks: OtherRanks | None = None
    with tempfile.TemporaryDirectory(prefix="polyrl-ranks-") as folder:
        try:
            given = info is not None
            info = _own_info(recipe.train.ranks, folder) if info is None else info
            num_here = info.size if info.local_size is None else info.local_size
            if device == "cuda":
                check_gpus(num_here)
            announced = nodes.announce(info) if info.num_nodes > 1 and not given else None
            if not given:
                started += (_start(run_dir, info._replace(rank=one, local_rank=one)) for one in range(1, num_here))
            ranks = _meet(info, run_dir, started)
            del announced
            watch = _watch(info)
            setup = RankSetup(recipe, str(run_dir.absolute()), checkpoint and str(checkpoint.absolute()))
            if watch is not None:
                setup = msgspec.structs.replace(setup, watch_port=watch.port, watch_key=watch.key)
            ranks.broadcast(msgspec.msgpack.encode(setup))
            ranks.use(device, recipe.train.replicas, recipe.train.context_ranks)
            other_ranks = OtherRanks(ranks, run_dir, started, watch)
            other_ranks.shares_run_dir = sharded.is_shared(run_dir, ranks)
            if not other_ranks.shares_run_dir:
                log.warning("%s: not all nodes see it: rank zero gathers checkpoints, and writes them alone", run_dir)
            yield other_ranks
        except RuntimeError as error:
            gone = (lambda: _ended(run_dir, started)) if other_ranks is None else other_ranks._gone
            if (lost := _lost(error, run_dir, started, gone)) is None:
                raise
            raise lost from error
        finally:
            if other_ranks is not None:
                other_ranks.close()
            for process in started:
                process.kill()
                process.wait()


def _own_info(size: int, folder: str) -> "RankInfo":
    """Return what rank zero knows of itself where it starts the others, or other nodes do."""
    from polyrl.trainer.ranks import RankInfo

    wanted = nodes.remembered(os.environ)
    return RankInfo(0, size, f"{folder}/meeting-point") if wanted is None else wanted.info(0, size)


def _watch(info: "RankInfo") -> "RankWatch | None":
    if info.num_nodes == 1:
        return None
    from polyrl.run.rank_watch import RankWatch

    return RankWatch(info.size)


def _meet(info: "RankInfo", run_dir: Path, started: "list[subprocess.Popen[bytes]]") -> "Ranks":
    """Meet the other ranks. Raises UserError, at once when one that was started has ended.

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
            if (lost := _ended(run_dir, started)) is not None:
                raise lost from None
        except RuntimeError as error:
            lost = _lost(error, run_dir, started, lambda: _ended(run_dir, started)) if started else None
            raise lost or UserError(f"the ranks did not meet, see {run_dir / 'logs'}: {one_line(error)}") from error


def _lost(
    error: RuntimeError,
    run_dir: Path,
    started: "list[subprocess.Popen[bytes]]",
    gone: Callable[[], RankLost | None],
) -> RankLost | None:
    """Return the rank that ended, if that explains the error; otherwise None."""
    if not any(word in str(error) for word in _BROKEN):
        return None
    until = time.monotonic() + 2 * _DEATH_IS_SEEN_S
    while time.monotonic() < until:
        if (lost := gone()) is not None:
            return lost
        time.sleep(_LOOK_EVERY_S)
    return None if started else RankLost(f"another rank has ended: see {run_dir / 'logs'}", _go_on(run_dir))


def _ended(run_dir: Path, started: "list[subprocess.Popen[bytes]]") -> RankLost | None:
    """Return the first rank that has ended by itself; None if all are running."""
    for number, process in enumerate(started, 1):
        code = process.poll()
        if code is not None and code != _EXIT_LOST_OTHERS:
            why = f"rank {number} {processes.show_end(code, log_file(run_dir, number))}"
            return RankLost(why, _go_on(run_dir))
    return None


def _start(run_dir: Path, info: "RankInfo") -> "subprocess.Popen[bytes]":
    with log_file(run_dir, info.rank).open("ab") as output:
        return nodes.start_rank(info, output.fileno())


def follow(info: "RankInfo") -> int:
    """Run a rank other than zero. It logs its errors; rank zero reports them to the user."""
    from polyrl.engines.builtin.config import choose_device
    from polyrl.run import connecting, models, replica
    from polyrl.trainer import leading
    from polyrl.trainer.ranks import Ranks
    from polyrl.trainer.state import restoring, sharded
    from polyrl.trainer.state.sharded import ShardFile, ShardWriter

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if not info.meeting_point:  # torchrun tells all to end at once; rank zero still needs the others while it does so
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    ranks = Ranks.join(info)
    setup = msgspec.msgpack.decode(ranks.broadcast(), type=RankSetup)
    run_dir, recipe = Path(setup.run_dir), setup.recipe
    look_in(recipe.modules)
    log_file(run_dir, info.rank).parent.mkdir(parents=True, exist_ok=True)  # the run's directory may be elsewhere
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", filename=log_file(run_dir, info.rank))
    try:
        if setup.watch_port:
            from polyrl.run.rank_watch import Attendance

            Attendance(info.host, setup.watch_port, setup.watch_key, info)
        ranks.use(choose_device(recipe.model.device), recipe.train.replicas, recipe.train.context_ranks)
        is_shared = sharded.is_shared(run_dir, ranks)
        learner = models.load_learner(recipe, ranks)
        if setup.checkpoint is not None:
            restoring.restore(learner, ranks, Path(setup.checkpoint), is_shared=is_shared)
        log.info("rank %d of %d is ready, on %s", info.rank, info.size, ranks.device)
        with contextlib.ExitStack() as stack:
            share = None
            if ranks.heads is not None:
                share = stack.enter_context(contextlib.closing(connecting.node_share(recipe, learner, ranks.heads)))
            if ranks.replica_number > 0 and ranks.replica.rank == 0:
                run_loop(replica.ReplicaProcess(recipe, ranks, learner, share).run())
            else:
                writes = is_shared and ranks.replica_number == 0  # other replicas hold the same
                writer = ShardWriter(run_dir, ShardFile(info.rank, ranks.replica.size)) if writes else None
                leading.follow(ranks.replica, learner, writer, share)
    except (UserError, OSError) as error:
        log.error("%s", error)
        return 1
    except RuntimeError as error:
        log.exception("rank %d cannot go on", info.rank)
        return _EXIT_LOST_OTHERS if any(word in str(error) for word in _BROKEN) else 1
    ranks.close()
    return 0


def log_file(run_dir: Path, rank: int) -> Path:
    return run_dir / "logs" / f"rank-{rank}.log"


def _go_on(run_dir: Path) -> str:
    from polyrl.trainer.state import checkpoint

    if not checkpoint.found(run_dir):
        return "nothing is trained yet: the same command begins again"
    return f"go on with `polyrl train --resume {shlex.quote(str(run_dir))}`"
