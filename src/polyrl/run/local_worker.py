"""The trainer's own devices as a member of the fleet: an engine on its model, and a worker that hosts it.

The engine is there before the run is opened, and the worker joins when there is a version to write with. Where the
recipe wants no local generation there is no worker, and the engine, if validation needs one, sleeps in between.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from polyrl.client import Fleet
from polyrl.config.recipe import Recipe
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.run import models
from polyrl.trainer.devices import Devices
from polyrl.trainer.local_engine import LocalEngine
from polyrl.trainer.model import Policy
from polyrl.wire.dial import Dialer
from polyrl.worker.agent import Left, WorkerAgent, WorkerOptions

NAME = "trainer"
"""The worker of the first replica."""
_DRAIN_S = 2.0
_GPU_SLOTS = 256
_CPU_SLOTS, _FEW_CPU_SLOTS = 128, 32
"""The most on a CPU; and how many samples of a round it takes in any case, before it leaves any to the fleet."""
_PROMPT_ROOM = 512
"""Tokens of a prompt that the local engine's cache is made for; with longer ones fewer samples run at once."""


def name_of(replica: int) -> str:
    """Return the name of a replica's worker."""
    return NAME if replica == 0 else f"{NAME}-{replica}"


def names(recipe: Recipe) -> list[str]:
    return [name_of(replica) for replica in range(recipe.train.replicas)]


@asynccontextmanager
async def started_engine(
    recipe: Recipe, policy: Policy, *, generates: bool | None = None
) -> AsyncIterator[LocalEngine | None]:
    """Run an engine on the trainer's own device; None if it never generates: neither for the fleet nor, on the first
    replica, for validation."""
    if not (models.uses_engine(recipe) if generates is None else generates):
        yield None
        return
    models.free_device()  # steps of the log may have been trained: an engine's cache is sized by what is free
    engine = make_engine(recipe, policy)
    try:
        await engine.start()
        if not recipe.train.local_generation:
            await engine.sleep()  # only validation wakes it: training has the memory of its cache
        yield engine
    finally:
        await engine.close()


def make_engine(recipe: Recipe, policy: Policy) -> LocalEngine:
    """Make it with `num_slots` for a round's samples, and a cache that holds so many at their longest."""
    num = sum(domain.prompts_per_step for domain in recipe.data.all_domains) * recipe.rounds.samples_per_prompt
    slots = num_slots(num, policy.device.type)
    config = BuiltinConfig(
        model=recipe.model.path,
        dtype=None if recipe.model.dtype == "auto" else recipe.model.dtype,
        device=str(policy.device),
        version=None,
        max_context=recipe.model.max_context,
        compile=policy.compiled,  # they share the layers
        slots=slots,
        kv_tokens=min(slots * (recipe.rollout.max_new_tokens + _PROMPT_ROOM), policy.max_cache_tokens()),
    )
    return LocalEngine(config, policy.loaded)


def num_slots(num_samples: int, device_type: str) -> int:
    """Return how many samples of a round the local engine runs at once.

    It has a new version before any other worker does, and an answer of a small model is written before they have
    fetched it. On a CPU, which trains small models, half of a round is therefore left for the first worker to be free.
    """
    if device_type == "cuda":
        return min(_GPU_SLOTS, num_samples)
    return min(_CPU_SLOTS, num_samples, max(_FEW_CPU_SLOTS, -(-num_samples // 2)))


@asynccontextmanager
async def joined(
    recipe: Recipe, dialer: Dialer, fleet: Fleet, engine: LocalEngine | None, devices: Devices
) -> "AsyncIterator[asyncio.Task[Left] | None]":
    """Join the fleet with the trainer's devices. None without local generation: only validation uses the engine."""
    if engine is None or not recipe.train.local_generation:
        yield None
        return
    # An open round would give it samples that it cannot write, or sign, yet.
    async with working(dialer, engine, devices, NAME, fleet.until_published) as task:
        yield task


@asynccontextmanager
async def working(
    dialer: Dialer,
    engine: LocalEngine,
    devices: Devices,
    name: str,
    until_ready: Callable[[], Awaitable[None]] | None = None,
) -> "AsyncIterator[asyncio.Task[Left]]":
    """Run a worker on a replica's devices, from `until_ready` on."""
    options = WorkerOptions(name, is_local=True, relays=False, drain_deadline_s=_DRAIN_S)
    agent = WorkerAgent(engine, dialer, options, set_duty=devices.set_duty)
    has_joined = False

    async def live() -> Left:
        nonlocal has_joined
        if until_ready is not None:
            await until_ready()
        has_joined = True
        return await agent.run()

    task = asyncio.create_task(live(), name="the trainer's own worker")
    try:
        yield task
    finally:
        if has_joined and not task.done():
            agent.drain("the run is over")
            await asyncio.wait((task,), timeout=2 * _DRAIN_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
