"""The first rank of a replica other than the first: it hosts a local worker, and trains what rank zero hands it.

    rank zero -> one command at a time -> this process -> the ranks that share its copy of the model
    manager   -> ChangeDuty            -> its own worker's agent -> the duty of its devices

Rules kept here: work waits until the devices train, as at rank zero. From a step's end until rank zero says that the
new version is published, the engine does not wake: its weights would have another version than it names.
"""

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from functools import partial

import msgspec

from polyrl.config.recipe import Recipe
from polyrl.engines.engine import Weights
from polyrl.engines.finishing import finish_first
from polyrl.errors import UserError
from polyrl.ids import Version
from polyrl.run import local_worker
from polyrl.run.encryption import encryption
from polyrl.trainer.batch import decode_groups
from polyrl.trainer.devices import Devices
from polyrl.trainer.leading import Add, Begin, Finish, Leader, Learner, StopRanks
from polyrl.trainer.local_engine import LocalEngine
from polyrl.trainer.publishing import NodeShare, VersionFacts
from polyrl.trainer.ranks import RankLines, Ranks
from polyrl.trainer.replicas import (
    CommandDone,
    JoinRun,
    NameVersion,
    ReleaseDevices,
    ReplicaCommand,
    ReplicaNews,
    ServeShares,
    TrainingChanged,
)
from polyrl.trainer.step_stats import Steps
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import Left

log = logging.getLogger("polyrl.train")


class ReplicaProcess:
    """Carries out rank zero's commands until it says stop."""

    def __init__(self, recipe: Recipe, ranks: Ranks, learner: Learner, share: NodeShare | None) -> None:
        self._share = share
        self._recipe, self._learner, self._number = recipe, learner, ranks.replica_number
        self._lines: RankLines = ranks.lines[ranks.replica_number]
        self._leader = Leader(ranks.replica, learner, lambda _: None) if ranks.replica.size > 1 else None
        self._steps: Steps = learner.steps if self._leader is None else self._leader
        self._devices = Devices()
        self._engine: LocalEngine | None = None
        self._join: JoinRun | None = None
        """The run to join, until it has joined."""
        self._worker: asyncio.Task[Left] | None = None
        self._held = AsyncExitStack()
        """The devices, while they are kept for training after a step's end."""
        self._stack = AsyncExitStack()
        self._sender = ThreadPoolExecutor(1, thread_name_prefix="to rank zero")

    async def run(self) -> None:
        """Raises RuntimeError when rank zero is gone, and UserError when its own worker has to leave."""
        commands: asyncio.Queue[ReplicaCommand | RuntimeError] = asyncio.Queue()
        self._listen(commands)
        async with self._stack:
            while True:
                command = await self._next(commands)
                if isinstance(command, StopRanks):
                    break
                trained_s = await self._carry_out(command)
                self._say(CommandDone(trained_s))
        if self._leader is not None:
            await asyncio.to_thread(self._leader.stop)
        self._devices.close()
        self._say(CommandDone())
        self._sender.shutdown(wait=True)

    def _listen(self, commands: "asyncio.Queue[ReplicaCommand | RuntimeError]") -> None:
        loop = asyncio.get_running_loop()

        def hear() -> None:
            while True:
                command: ReplicaCommand | RuntimeError
                try:
                    command = msgspec.msgpack.decode(self._lines.down.receive(), type=ReplicaCommand)
                except RuntimeError as error:
                    command = error
                with contextlib.suppress(RuntimeError):  # the loop is closed: this process ends
                    loop.call_soon_threadsafe(commands.put_nowait, command)
                if isinstance(command, StopRanks | RuntimeError):
                    return

        threading.Thread(target=hear, name="from rank zero", daemon=True).start()

    async def _next(self, commands: "asyncio.Queue[ReplicaCommand | RuntimeError]") -> ReplicaCommand:
        coming = asyncio.ensure_future(commands.get())
        await asyncio.wait([coming, *([] if self._worker is None else [self._worker])], return_when="FIRST_COMPLETED")
        if not coming.done():
            coming.cancel()
            assert self._worker is not None
            raise UserError(f"its own worker has left: {self._worker.result()}")
        command = coming.result()
        if isinstance(command, RuntimeError):
            raise command
        return command

    async def _carry_out(self, command: ReplicaCommand) -> float:
        """Return how many seconds of training it took."""
        before = self._devices.trained_s
        match command:
            case Begin(step, num_steps):
                await self._held.aclose()
                self._steps.begin(step, num_steps)
            case Add(data, first):
                groups = await asyncio.to_thread(decode_groups, data)
                await self._devices.train(lambda: self._steps.add(groups, first))
            case Finish(may_be_void):
                await self._held.enter_async_context(self._devices.held())
                await self._devices.run(lambda: self._steps.finish(may_be_void=may_be_void))
            case JoinRun():
                await self._start_engine(command)
                before = self._devices.trained_s
            case ServeShares(facts):
                await finish_first(asyncio.to_thread(self._serve_share, facts))
            case NameVersion(version):
                await self._name_version(version)
            case ReleaseDevices():
                await self._held.aclose()
                await self._join_if_due()
            case StopRanks():
                raise AssertionError("this ends the run")
        return self._devices.trained_s - before

    async def _start_engine(self, command: JoinRun) -> None:
        """Steps of the log are trained by now: an engine's cache is sized by what is free."""
        recipe = self._recipe
        self._engine = await self._stack.enter_async_context(
            local_worker.started_engine(recipe, self._learner.policy, generates=bool(recipe.train.local_generation))
        )
        self._devices.close()
        generates = self._engine is not None
        self._devices = Devices(self._engine, generates=generates, on_duty=lambda on: self._say(TrainingChanged(on)))
        if generates:
            self._join = command
            self._say(TrainingChanged(is_training=False))

    def _serve_share(self, facts: VersionFacts) -> None:
        policy = self._learner.policy
        if self._leader is not None:
            gathered = self._leader.weights(facts)
        else:
            gathered = policy.served_parts() if facts.adapter is None else iter(policy.published().items())
        if self._share is None:  # of this replica's ranks, another one is the first of its node
            deque(gathered, maxlen=0)
        else:
            self._share.offer(facts, gathered)

    async def _name_version(self, version: int) -> None:
        leader, policy = self._leader, self._learner.policy
        if leader is not None and policy.has_own_engine_copy:
            await finish_first(asyncio.to_thread(leader.refresh_engine_copy))
        write: Callable[[], None] | None = policy.engine_writer()
        if self._engine is not None:
            await self._engine.install(Weights(Version(version), in_place=True, write=write))
        elif write is not None:
            await finish_first(asyncio.to_thread(write))

    async def _join_if_due(self) -> None:
        """Join once there is a published version to write with."""
        join, self._join = self._join, None
        if join is None or self._engine is None:
            return
        tls = encryption(self._recipe.manager)
        dialer = Dialer(join.url, join.token, None if tls is None else tls.client)
        name = local_worker.name_of(self._number)
        self._worker = await self._stack.enter_async_context(
            local_worker.working(dialer, self._engine, self._devices, name)
        )
        log.info("replica %d joins the fleet as %s", self._number, name)

    def _say(self, news: ReplicaNews) -> None:
        self._sender.submit(partial(self._lines.up.send, msgspec.msgpack.encode(news)))
