"""Bring a run's fleet to a number of workers from another process, or take it down.

Rules kept here: while a trainer keeps the fleet, the number is written where the trainer reads it, and what it does is
watched. Otherwise the work is done here, under the keeper's lock. Both may be done again at any time.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from polyrl.config import apply_overrides, build, load_toml
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.providers.provider import HeldWorker, ProviderError
from polyrl.run import keeping
from polyrl.run.encryption import encryption
from polyrl.run.processes import ManagerAddress
from polyrl.run.workers import recipe_and_url

EXIT_NOT_ALL = 1
_LOOK_EVERY_S = 0.2

Say = Callable[[str], None]


class Wish(NamedTuple):
    run_dir: Path
    settings: Sequence[str]
    workers: int | None
    is_auto: bool
    timeout_s: float


async def bring_up(wish: Wish, say: Say) -> int:
    """Return the exit code: 0 when all workers are there that should be. Raises UserError."""
    recipe = _recipe(wish)
    number = None if wish.is_auto else recipe.fleet.workers if wish.workers is None else wish.workers
    with keeping.keepers_lock(wish.run_dir) as is_ours:
        if not is_ours:
            _refuse_changes(wish)
        elif wish.is_auto:
            raise UserError(f"--auto: no trainer runs in {wish.run_dir}; expected --workers N")
        _refuse_beside_the_planner(recipe, number, is_ours=is_ours)
        keeping.write_wanted(wish.run_dir, number)
        keeper = _keeper(recipe, wish.run_dir, needs_manager=True)
        try:
            if number is None:
                say(f"{wish.run_dir}: the run chooses how many workers it holds")
                return 0
            before = await _held(keeper)
            return await _reach(keeper, number, before, wish.timeout_s, say, is_ours=is_ours)
        finally:
            await keeper.provider.close()


async def take_down(wish: Wish, say: Say) -> int:
    """Return the exit code: 0 when none is left. Raises UserError."""
    recipe = _recipe(wish)
    with keeping.keepers_lock(wish.run_dir) as is_ours:
        if not is_ours:
            _refuse_changes(wish)
        keeping.write_wanted(wish.run_dir, 0)
        keeper = _keeper(recipe, wish.run_dir, needs_manager=False)
        try:
            before = await _held(keeper)
            if is_ours:
                await keeper.end_all()
            return await _reach(keeper, 0, before, wish.timeout_s, say, is_ours=False)
        finally:
            await keeper.provider.close()


def _recipe(wish: Wish) -> Recipe:
    file = wish.run_dir / "recipe.toml"
    if not file.is_file():
        raise UserError(f"{wish.run_dir}: is no run of `polyrl train`; expected a directory with recipe.toml in it")
    strange = [one for one in wish.settings if not one.lstrip().startswith("fleet.")]
    if strange:
        raise UserError(f"{strange[0]}: expected keys of the section fleet, like fleet.provider=slurm")
    return build(apply_overrides(load_toml(file), list(wish.settings)), Recipe, source=str(file))


def _refuse_changes(wish: Wish) -> None:
    if wish.settings:
        raise UserError(f"{wish.settings[0]}: a trainer keeps the workers of {wish.run_dir}; its recipe says how")


def _refuse_beside_the_planner(recipe: Recipe, number: int | None, *, is_ours: bool) -> None:
    """Refuse a number where the planner divides devices: what fits changes with the width that it wants."""
    if not recipe.parallelism.enabled or number is None:
        return
    if not is_ours:
        raise UserError("--workers: parallelism.enabled says how many servers the run has; expected --auto")
    if number > recipe.fleet.workers:
        raise UserError(f"--workers: {number}; expected at most {recipe.fleet.workers}: [fleet] has no more devices")


def _keeper(recipe: Recipe, run_dir: Path, *, needs_manager: bool) -> keeping.FleetKeeper:
    found = recipe_and_url(run_dir)
    if found is None and needs_manager:
        raise UserError(f"{run_dir}: no manager runs there; start it with `polyrl train --resume {run_dir}`")
    url = "http://127.0.0.1:0" if found is None else found[1]
    address = ManagerAddress(url, int(url.rpartition(":")[2]), encryption(recipe.manager))
    return keeping.make_keeper(recipe, run_dir, address, ends_with_us=False)


async def _held(keeper: keeping.FleetKeeper) -> Mapping[str, HeldWorker]:
    try:
        return {name: one for name, one in (await keeper.provider.held()).items() if one.state != "ended"}
    except ProviderError as error:
        raise UserError(str(error)) from error


async def _reach(
    keeper: keeping.FleetKeeper,
    number: int,
    before: Mapping[str, HeldWorker],
    timeout_s: float,
    say: Say,
    *,
    is_ours: bool,
) -> int:
    """Wait until so many workers are there, and do what is missing if that is ours."""
    deadline = time.monotonic() + timeout_s
    if is_ours:
        await keeper.adopt()
        for name in keeper.aim(number):
            keeper.let_go(name, lambda _: None, "no longer wanted")
    while True:
        if is_ours:
            await keeper.start_missing(lambda line: say(str(line)))
            keeper.held = await keeper.provider.held()
            keeper.note_ends(lambda line: say(str(line)))
        held = await _held(keeper)
        there = [name for name, one in held.items() if one.is_there]
        if len(held) == len(there) == number:
            break
        if time.monotonic() > deadline or keeper.given_up:
            say(f"{len(there)} of {number} workers are there; said again, this command goes on from here")
            return EXIT_NOT_ALL
        await asyncio.sleep(_LOOK_EVERY_S)
    _tell(before, held, say)
    return 0


def _tell(before: Mapping[str, HeldWorker], now: Mapping[str, HeldWorker], say: Say) -> None:
    for name in (name for name in now if name not in before):
        say(f"{name}: started, {now[name].place}" if now[name].place else f"{name}: started")
    for name in (name for name in before if name not in now):
        say(f"{name}: ended")
    if before.keys() == now.keys():
        say(f"nothing to do: {len(now)} worker{'' if len(now) == 1 else 's'} there")
