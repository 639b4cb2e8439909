"""A run's connections: its manager's process, the client that dials it, the server of weights, and the end of them."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable, Container, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path

import numpy as np

from polyrl.client import Fleet, Group, Prompt, RewardResult, Sample, connect
from polyrl.client.fleet import UNKNOWN_CPU_S
from polyrl.config.recipe import Recipe
from polyrl.engines.builtin.models import Loaded
from polyrl.errors import PolyrlError, RankLost, UserError
from polyrl.run import checkpoints, local_worker, models, processes
from polyrl.run.checkpoints import ResumePoint
from polyrl.run.encryption import Encryption, check_reachable
from polyrl.run.processes import ManagerAddress, ManagerProcess
from polyrl.run.settings import caveat_of, manager_options, sampling_of, scheduler_config, weight_settings
from polyrl.run.task_contract import Answered, Tasks
from polyrl.trainer.leading import Learner
from polyrl.trainer.publishing import NodeShare
from polyrl.weights.buffers import Buffer
from polyrl.weights.server import WeightServer
from polyrl.weights.shares import ServingNodes
from polyrl.weights.tensors import pin_buffer
from polyrl.wire.control import AnswerRules, DrainRequest, Status
from polyrl.wire.credentials import read_token_file
from polyrl.wire.dial import Dialer, Unreachable

log = logging.getLogger("polyrl.train")

_DISMISS_S = 5.0
_TYPICAL_PROMPT = 512
"""Of an environment, whose prompts are not known beforehand."""


@asynccontextmanager
async def started_manager(
    recipe: Recipe, run_dir: Path, point: ResumePoint | None, tls: Encryption | None
) -> AsyncIterator[tuple[ManagerProcess, ManagerAddress]]:
    """Start the run's manager, and yield its address: at the port that the run had, if that is free.

    Raises UserError for a manager that does not come up, or a certificate whose name does not lead to it.
    """
    before = 0 if point is None else point.port

    async def choose() -> int:
        port = await processes.choose_port(recipe.manager, before)
        if before and not port:
            log.warning("port %d, which the run had, is taken: workers that know that one must join anew", before)
        return port

    async def start(port: int) -> tuple[ManagerProcess, ManagerAddress]:
        manager = ManagerProcess(run_dir, recipe.manager.host, port, manager_options(recipe))
        try:
            return manager, await manager.start()
        except BaseException:
            await manager.stop()
            raise

    manager, address = await processes.start_at_port(choose, start)
    try:
        checkpoints.write_port(run_dir, address.port)
        if tls is not None:
            address = ManagerAddress(tls.url(address.port), address.port, tls)
            await check_reachable(dialer(run_dir, address))
        yield manager, address
    finally:
        await manager.stop()


def dialer(run_dir: Path, address: ManagerAddress) -> Dialer:
    tls = None if address.tls is None else address.tls.client
    return Dialer(address.url, read_token_file(run_dir / "admin.token"), tls)


def answer_rules(loaded: Loaded) -> AnswerRules:
    """Return the rules that answers of this model keep."""
    return AnswerRules(vocab=loaded.vocab, end_ids=tuple(sorted(loaded.end_ids)), max_context=loaded.max_context)


@asynccontextmanager
async def connected(
    recipe: Recipe, run_dir: Path, address: ManagerAddress, tasks: Tasks, loaded: Loaded, point: ResumePoint | None
) -> AsyncIterator[Fleet]:
    """Connect the trainer's client, and open the run. Raises UserError for a manager that knows another run."""
    sampling = sampling_of(recipe)
    typical = int(np.mean([len(tasks.tokens(domain, 0)) or _TYPICAL_PROMPT for domain in range(len(tasks.names))]))

    def prompt_of(domain: int, prompt: int, epoch: int) -> Prompt:
        return Prompt(tasks.tokens(domain, prompt).tolist(), sampling, tasks.row(domain, prompt))

    async def reward_of(sample: Sample) -> RewardResult:
        origin = sample.origin
        found = await tasks.score(origin.domain, origin.prompt, _answered(sample), sample.limit_s)
        cpu_s = UNKNOWN_CPU_S if found.cpu_s is None else found.cpu_s  # nothing to learn from, and not free either
        return RewardResult(found.score, bool(found.correct), cpu_s, found.parts, found.outcome)

    async def group_reward_of(group: Group) -> list[RewardResult | None]:
        answers = [_answered(one) for one in group.samples]
        found = await tasks.score_group(group.origin.domain, group.origin.prompt, answers)
        return [None if one is None else RewardResult(one.score, parts=one.parts) for one in found]

    async with connect(
        address.url,
        read_token_file(run_dir / "admin.token"),
        scheduler_config(recipe, tasks.num_prompts, typical),
        prompts=prompt_of,
        reward=reward_of,
        group_reward=group_reward_of if tasks.scores_groups else None,
        has_weights=True,
        caveat=caveat_of(recipe),
        trains=True,
        answers=answer_rules(loaded),
        tls=None if address.tls is None else address.tls.client,
    ) as fleet:
        if point is not None:
            assert fleet.opened is not None
            fleet.digests.update(point.published)
            checkpoints.check_that_it_fits(fleet.opened, point.next_step, recipe.max_staleness)
        yield fleet


def _answered(sample: Sample) -> Answered:
    return Answered(sample.tokens.tolist(), sample.finish, sample.calls, sample.own)


def key_of_weights(fleet: Fleet) -> bytes:
    """Return the key that the manager gave the run."""
    assert fleet.opened is not None
    return bytes.fromhex(fleet.opened.weights_key)


@contextmanager
def weight_server(
    recipe: Recipe, fleet: Fleet, tls: Encryption | None, device: str, nodes: ServingNodes | None
) -> Iterator[WeightServer]:
    """Serve weights for as long as this lasts; with `nodes`, this node's share of them."""
    of_weights = None if tls is None else tls.of_weights
    server = WeightServer(weight_settings(recipe), key_of_weights(fleet), of_weights, _pin(device), nodes)
    server.start()
    with contextlib.closing(server):
        yield server


def node_share(recipe: Recipe, learner: Learner, nodes: ServingNodes) -> NodeShare:
    """Return what another node than the first serves."""

    def start(key: bytes) -> WeightServer:
        server = WeightServer(weight_settings(recipe), key, None, _pin(learner.policy.device.type), nodes)
        server.start()
        return server

    return NodeShare(learner.policy, start, as_in_files=models.is_served(recipe))


def _pin(device: str) -> Callable[[Buffer], object] | None:
    return pin_buffer if device == "cuda" else None


@asynccontextmanager
async def dismissed_at_the_end(recipe: Recipe, fleet: Fleet, dialer: Dialer) -> AsyncIterator[None]:
    """Tell all workers, hosts and reward workers when the run is over: one that is not told dials for ten minutes. A
    run that was interrupted is not over."""
    own = local_worker.names(recipe)
    try:
        yield
    except RankLost:  # it goes on by itself
        raise
    except PolyrlError:
        await _dismiss(fleet, dialer, own)
        raise
    await _dismiss(fleet, dialer, own)


async def _dismiss(fleet: Fleet, dialer: Dialer, own: Container[str]) -> None:
    with contextlib.suppress(TimeoutError, Unreachable, UserError):
        async with asyncio.timeout(_DISMISS_S), dialer:
            for kind, name in _others(await fleet.status(), own):
                await _drain(dialer, kind, name)
            while _others(await fleet.status(), own):
                await asyncio.sleep(0.1)


def _others(status: Status, own: Container[str]) -> list[tuple[str, str]]:
    """Return the kinds and names of all that joined, but for the trainer's own workers."""
    workers = [("workers", one.name) for one in status.workers if one.name not in own]
    hosts = [("hosts", one.name) for one in status.hosts]
    return [*workers, *hosts, *(("reward-workers", one.name) for one in status.reward_workers)]


async def _drain(dialer: Dialer, kind: str, name: str) -> None:
    with contextlib.suppress(UserError):  # it has left meanwhile: the others are still to be told
        await dialer.post(f"/v1/{kind}/{name}/drain", DrainRequest(reason="the run is over"), dict)
