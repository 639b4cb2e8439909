"""A run's reward workers, which dial in from elsewhere: the connection for their jobs, and what is said without them.

Rules kept here: a run starts no reward worker. With `rewards.processes = 0` and none there, answers wait, and a line
says so now and then; that is no failure.
"""

import asyncio
import logging
import shlex
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from polyrl.client import Fleet
from polyrl.config.recipe import Recipe
from polyrl.config.rewards import STAYS
from polyrl.errors import ConfigError
from polyrl.rewards.pool import RewardPool
from polyrl.rewards.remote.dispatcher import Dispatcher
from polyrl.rewards.remote.travel import RewardTerms, pack_terms
from polyrl.run.supervising import meanwhile
from polyrl.run.tasks import reward_keys
from polyrl.run.workers import from_elsewhere
from polyrl.telemetry.looks import show_seconds
from polyrl.wire.dial import Dialer
from polyrl.wire.reward_frames import MAX_RULES_BYTES

log = logging.getLogger("polyrl.train")

_LOOK_EVERY_S = 1.0
_FIRST_LINE_S = 20.0
_LINE_EVERY_S = 120.0


@asynccontextmanager
async def dispatched(recipe: Recipe, dialer: Dialer, fleet: Fleet, pool: RewardPool | None) -> AsyncIterator[None]:
    """Let reward workers score for as long as this lasts."""
    if pool is None:
        yield
        return
    assert fleet.opened is not None
    terms = pack_terms(terms_of(recipe))
    dispatcher = Dispatcher(pool.remote, dialer, fleet.opened.session, terms, recipe.rewards.processes)
    async with meanwhile(dispatcher.run(), _tell_of_places(recipe, pool)):
        yield


def check(recipe: Recipe) -> None:
    """Raise ConfigError for settings that cannot be sent to reward workers, in a run that needs them."""
    num_bytes = 0 if recipe.rewards.processes else len(pack_terms(terms_of(recipe)))
    if num_bytes > MAX_RULES_BYTES:
        raise ConfigError(
            f"rewards.functions: their arguments are {num_bytes:,} bytes; expected at most {MAX_RULES_BYTES:,}, which "
            "reward workers can be sent"
        )


def terms_of(recipe: Recipe) -> RewardTerms:
    """Return the settings that a reward worker is sent."""
    rewards = recipe.rewards
    return RewardTerms(
        functions={key: one for key, one in reward_keys(recipe).items() if one.function not in STAYS},
        wall_s=rewards.wall_s,
        memory_bytes=rewards.memory_bytes,
        environment=rewards.environment,
        sandbox=rewards.sandbox,
        start_s=rewards.start_timeout_s,
    )


def join_command(recipe: Recipe, run_dir: Path, url: str) -> str:
    """Return the command that starts a reward worker of this run on another machine."""
    trust = ["--ca", recipe.manager.ca] if recipe.manager.ca else []
    modules = ["--modules", recipe.modules] if recipe.modules else []
    joining = [
        "--join",
        from_elsewhere(url, recipe.manager),
        "--token-file",
        str(run_dir / "reward.token"),
        *trust,
        *modules,
    ]
    return shlex.join(["polyrl", "worker", "--rewards", *joining])


async def _tell_of_places(recipe: Recipe, pool: RewardPool) -> None:
    """Print, until cancelled, that no worker scores; and once that there are more places than are used."""
    since: float | None = None
    told_at, is_told = 0.0, False
    slots = recipe.rewards.max_under_way
    while True:
        await asyncio.sleep(_LOOK_EVERY_S)
        if not is_told and pool.remote.num_places > slots:
            is_told = True
            log.warning(
                "reward workers have %d places, and %d answers are scored at once: rewards.slots = %d uses all of them",
                *(pool.remote.num_places, slots, pool.remote.num_places + recipe.rewards.processes),
            )
        num, now = pool.state().waiting, time.monotonic()
        if not num or not pool.is_without_places:
            since = None
            continue
        since = now if since is None else since
        if now - since >= _FIRST_LINE_S and now - told_at >= _LINE_EVERY_S:
            told_at = now
            log.warning(
                "%d answers wait to be scored, for %s: rewards.processes = 0, and no reward worker is here; start one "
                "with polyrl worker --rewards",
                *(num, show_seconds(now - since)),
            )
