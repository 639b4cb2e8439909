"""Keep as many workers as are wanted: start those that are missing, start again those that ended, end those too many.

    wanted   what a person said last (`polyrl up`, `polyrl down`), else with the planner as many as its devices hold,
             else the scheduler's advice with scaling.enabled, else fleet.workers

Rules kept here: one process keeps the fleet of a run, the one that has the lock `fleet/keeper.lock`. A worker that
ends is started again after a pause that doubles with every end soon after a start; with fleet.replace = false, or when
it ended for a mistake that another start would repeat, it is not. A provider that fails is tried again, and said once.
Where the provider knows its market (providers/market.py), no more workers are started than are offered. Workers too
many are drained by the manager before their provider ends them, the least useful first. Engines of several devices here
start on devices that no other worker has; with the planner there are never more than its devices hold.
"""

import asyncio
import contextlib
import fcntl
import json
import logging
import os
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from urllib.parse import quote

from msgspec import Struct
from rich.text import Text

from polyrl.client import Fleet
from polyrl.config.recipe import Recipe
from polyrl.disk import write_whole
from polyrl.errors import PolyrlError, UserError
from polyrl.providers.local import LocalProvider
from polyrl.providers.market import MarketOffer, PricedProvider
from polyrl.providers.provider import HeldWorker, Provider, ProviderError, WorkerOrder
from polyrl.providers.registry import make_provider, run_of
from polyrl.run.connecting import dialer
from polyrl.run.devices_in_use import DevicesInUse
from polyrl.run.processes import ManagerAddress, last_line
from polyrl.run.workers import devices_of, from_elsewhere, worker_arguments
from polyrl.wire.control import DrainRequest
from polyrl.wire.credentials import TOKEN_FILES

log = logging.getLogger("polyrl.train")

Say = Callable[[str | Text], None]

_LOOK_EVERY_S = 0.5
_QUICK_S = 60.0
"""A worker that ends sooner than this after its start has ended quickly."""
_FIRST_PAUSE_S = 1.0
_MAX_PAUSE_S = 300.0
_JOIN_TIMEOUT_S = 120.0
_SERVER_TIMEOUT_S = 1800.0
"""A server loads and compiles for long."""
_WANTED = "wanted.json"
_LOCK = "keeper.lock"
MAX_WORKERS = 10_000


class _Life(Struct):
    """The history of a worker's starts."""

    started_at: float = 0.0
    num_quick: int = 0
    not_before: float = 0.0
    given_up: bool = False


def read_wanted(run_dir: Path) -> int | None:
    """Return how many workers a person asked for last, by `polyrl up` or `polyrl down`; None: the run decides."""
    try:
        number = json.loads((run_dir / "fleet" / _WANTED).read_text())["workers"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return number if isinstance(number, int) and 0 <= number <= MAX_WORKERS else None


def write_wanted(run_dir: Path, workers: int | None) -> None:
    (run_dir / "fleet").mkdir(parents=True, exist_ok=True)
    write_whole(run_dir / "fleet" / _WANTED, json.dumps({"workers": workers}).encode() + b"\n", 0o600)


@contextmanager
def keepers_lock(run_dir: Path) -> Iterator[bool]:
    """Hold the lock of the one that keeps a run's fleet. Yields False if another process has it."""
    folder = run_dir / "fleet"
    folder.mkdir(parents=True, exist_ok=True)
    handle = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
        else:
            yield True
    finally:
        os.close(handle)


class FleetKeeper:
    """The workers of a run that its provider starts and ends."""

    def __init__(
        self,
        recipe: Recipe,
        run_dir: Path,
        address: ManagerAddress,
        provider: Provider,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.provider = provider
        self.recipe, self._run_dir, self._address, self._clock = recipe, run_dir, address, clock
        self._names: list[str] = []
        """The workers that there should be."""
        self._spent: dict[str, None] = {}
        """Names of workers that were let go: one that was drained may not join again."""
        self.width = recipe.fleet.tensor_parallel
        self._is_reshaping = False
        self._devices = DevicesInUse(run_dir / "fleet")
        self._let_go: dict[str, asyncio.Task[None]] = {}
        self._lives: dict[str, _Life] = {}
        self._trouble = ""
        self._beside: list[str] = []
        """Workers that were started by hand, beside those that are wanted."""
        self.held: Mapping[str, HeldWorker] = {}
        self.offer: MarketOffer | None = None
        """The offer of the provider's market; None where it has none."""

    # How many

    def wanted(self, advised: int | None = None) -> int:
        """Return how many workers there should be now."""
        said = read_wanted(self._run_dir)
        if said is not None:
            return min(said, self.most)
        if self.recipe.parallelism.enabled:
            return self.most
        scaling = self.recipe.scaling
        if not scaling.enabled:
            return self.recipe.fleet.workers
        number = self.recipe.fleet.workers if advised is None else advised
        return min(scaling.max_workers, max(scaling.min_workers, number))

    @property
    def most(self) -> int:
        """How many workers there may be: with the planner, as many as its devices hold."""
        return self.recipe.fleet.num_devices // self.width if self.recipe.parallelism.enabled else MAX_WORKERS

    def aim(self, num: int, least_useful: Sequence[str] = ()) -> list[str]:
        """Want so many workers. Returns the names that are wanted no longer, the least useful of them first."""
        goes: list[str] = []
        while len(self._names) > num:
            name = next((one for one in least_useful if one in self._names), self._names[-1])
            self._names.remove(name)
            goes.append(name)
        number = 0
        while len(self._names) < num:
            name = f"worker-{number}"
            if name not in self._names and name not in self._let_go and name not in self._spent:
                self._names.append(name)
            number += 1
        return goes

    @property
    def expected(self) -> tuple[str, ...]:
        """The names of the workers that can be had: of those wanted, the first that are offered."""
        return self.names if self.offer is None else self.names[: self.offer.num_workers]

    @property
    def given_up(self) -> list[str]:
        """Wanted workers that are not started again."""
        return [name for name in self._names if name in self._lives and self._lives[name].given_up]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._names)

    def __contains__(self, name: object) -> bool:
        return name in self._names or name in self._beside

    # Doing it

    async def adopt(self) -> None:
        """Take over the workers that are there already, of whatever origin."""
        self.held = await self.provider.held()
        self._names = sorted(
            (name for name, one in self.held.items() if one.is_there), key=lambda name: (len(name), name)
        )

    async def hear_offer(self, say: Say) -> None:
        """Ask the provider what its market offers, if it has one. Where it cannot say, its last offer stands."""
        if isinstance(self.provider, PricedProvider):
            try:
                self.offer = await self.provider.offer()
            except ProviderError as error:
                self._complain(str(error), say)

    async def start_missing(self, say: Say) -> int:
        """Start the workers that should be there and are not, as long as more are offered. Returns how many were
        started."""
        num, there = 0, sum(one.is_there for one in self.held.values())
        for name in self._names:
            if self.offer is not None and there + num >= self.offer.num_workers:
                break
            one, life = self.held.get(name), self._lives.setdefault(name, _Life())
            if (one is not None and one.state != "ended") or life.given_up or self._clock() < life.not_before:
                continue
            if self._has_own_devices(name) and not self._take_devices(name):
                continue  # they are those of a worker that has not ended yet
            try:
                await self.start(name)
            except ProviderError as error:
                self._complain(str(error), say)
                life.not_before = self._clock() + min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**life.num_quick)
                life.num_quick += 1
                continue
            self._trouble = ""
            num += 1
        return num

    async def start(self, name: str) -> None:
        """Start one worker. Raises ProviderError."""
        life = self._lives.setdefault(name, _Life())
        life.started_at, life.not_before = self._clock(), 0.0
        await self.provider.start(self.order(name))

    async def start_beside(self, name: str) -> None:
        """Start a worker more than are wanted. It is ended with the others."""
        self._beside.append(name)
        await self.start(name)

    def kill(self, name: str) -> None:
        """Kill a worker on this machine, as if its machine had died."""
        assert isinstance(self.provider, LocalProvider), "only processes here can be killed"
        self.provider.kill(name)

    def order(self, name: str) -> WorkerOrder:
        recipe, provider, width, own = self.recipe, self.provider, self.width, self._devices.of(name)
        url = self._address.url if provider.is_here else from_elsewhere(self._address.url, recipe.manager)
        files = {"shares_files": provider.shares_files}
        arguments = worker_arguments(recipe, self._run_dir, url, name, width, usd_per_hour=self.usd_per_hour, **files)
        token = (self._run_dir / TOKEN_FILES["worker"]).read_text(encoding="utf-8").strip()
        devices = {} if own is None or not self._has_own_devices(name) else devices_of(recipe, own)
        return WorkerOrder(name, tuple(arguments), token, self.log_file(name), devices)

    @property
    def usd_per_hour(self) -> float:
        """The price of another worker now."""
        price = None if self.offer is None else self.offer.usd_per_hour
        return self.recipe.fleet.price_usd_per_hour if price is None else price

    def _has_own_devices(self, name: str) -> bool:
        is_wide = self.width > 1 or self.recipe.parallelism.enabled
        return self.provider.is_here and is_wide and name in self._names

    def _take_devices(self, name: str) -> bool:
        """Make devices a worker's own that no other has. A worker has them until its provider says that it ended."""
        not_ended = [one.name for one in self.held.values() if one.state != "ended"]
        there = {*self._names, *self._let_go, *not_ended}
        most = max(self.recipe.fleet.num_devices, len(self._names) * self.width)
        return self._devices.take(name, self.width, most, there)

    async def reshape(self, width: int) -> None:
        """Have workers of so many devices each: the old ones have ended before new ones start on their devices.
        Raises ProviderError."""
        self._is_reshaping = True
        try:
            old, self._names = self._names, []
            self._spent.update(dict.fromkeys(old))
            await asyncio.gather(*(self.provider.stop(name) for name in old))
            self.width = width
            self.aim(self.wanted())
            self.held = await self.provider.held()
            await self.start_missing(lambda line: log.warning("%s", line))
        finally:
            self._is_reshaping = False

    def log_file(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

    async def look(self, say: Say, advised: int | None = None, least_useful: Sequence[str] = ()) -> None:
        """Look once, and do what is missing."""
        if self._is_reshaping:
            return
        try:
            await self.hear_offer(say)
            self.held = await self.provider.held()
        except ProviderError as error:
            self._complain(str(error), say)
            return
        for name in self.aim(self.wanted(advised), least_useful):
            self.let_go(name, say, "no longer wanted")
        self.note_ends(say)
        await self.start_missing(say)

    def note_ends(self, say: Say) -> None:
        """Say of each worker that has ended so, and when it is started again."""
        for name in self._names:
            one, life = self.held.get(name), self._lives.get(name)
            if (one is not None and one.state != "ended") or life is None or not life.started_at:
                continue
            age_s = self._clock() - life.started_at
            life.started_at = 0.0
            life.num_quick = life.num_quick + 1 if age_s < _QUICK_S else 0
            failed = one is not None and one.failed
            life.given_up = failed or not self.recipe.fleet.replace
            pause_s = 0.0 if not life.num_quick else min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2 ** (life.num_quick - 1))
            life.not_before = self._clock() + pause_s
            say(Text(f"{name} {self._show_end(one, name)}; {_what_next(life, pause_s)}", style="yellow"))

    def _show_end(self, one: HeldWorker | None, name: str) -> str:
        how = f" ({one.why})" if one is not None and one.why else ""
        if one is not None and one.failed:
            return f"has ended{how}: {last_line(self.log_file(name))}"
        return f"has ended{how}, see {self.log_file(name)}"

    def let_go(self, name: str, say: Say, why: str) -> None:
        """Have a worker hand over and end, beside everything else."""
        self._spent[name] = None
        if name in self.held and name not in self._let_go:
            say(f"{name} is let go: {why}")
            self._let_go[name] = asyncio.create_task(self._end(name, why))

    async def _end(self, name: str, why: str) -> None:
        try:
            with contextlib.suppress(PolyrlError, OSError, asyncio.TimeoutError):
                async with asyncio.timeout(5.0), dialer(self._run_dir, self._address) as dialled:
                    path = f"/v1/workers/{quote(name, safe='')}/drain"
                    await dialled.post(path, DrainRequest(reason=f"let go: {why}"), dict)
            await self.provider.stop(name)
        except ProviderError as error:
            log.warning("%s cannot be ended: %s", name, error)
        finally:
            self._lives.pop(name, None)
            self._let_go.pop(name, None)

    async def end_all(self) -> None:
        """End every worker that the provider has."""
        await asyncio.gather(*self._let_go.values(), return_exceptions=True)
        with contextlib.suppress(ProviderError):
            self.held = await self.provider.held()
        ends = await asyncio.gather(*(self.provider.stop(name) for name in self.held), return_exceptions=True)
        for name, ended in zip(self.held, ends, strict=True):
            if isinstance(ended, ProviderError):
                log.warning("%s cannot be ended: %s", name, ended)
            elif isinstance(ended, BaseException):
                raise ended

    def _complain(self, why: str, say: Say) -> None:
        if why != self._trouble:
            self._trouble = why
            say(Text(f"fleet.provider = {self.recipe.fleet.provider}: {why}; it is tried again", style="yellow"))


def _what_next(life: _Life, pause_s: float) -> str:
    if life.given_up:
        return "the run goes on, and does not start it again: another joins with the command above"
    return f"the run goes on, and starts it again{f' in {pause_s:.0f} s' if pause_s >= 1 else ''}"


def check_provider(recipe: Recipe, run_dir: Path) -> None:
    """Raise UserError for a provider that is unknown, or cannot work here."""
    if recipe.fleet.workers or recipe.scaling.enabled or recipe.fleet.provider != "local":
        make_provider(recipe.fleet.provider, recipe.fleet.provider_args, run_of(run_dir, ends_with_us=True)).check()


def make_keeper(recipe: Recipe, run_dir: Path, address: ManagerAddress, *, ends_with_us: bool = True) -> FleetKeeper:
    """Return the keeper of a run's fleet. Raises UserError for a provider that cannot work here."""
    provider = make_provider(
        recipe.fleet.provider, recipe.fleet.provider_args, run_of(run_dir, ends_with_us=ends_with_us)
    )
    provider.check()
    return FleetKeeper(recipe, run_dir, address, provider)


@asynccontextmanager
async def started(recipe: Recipe, run_dir: Path, address: ManagerAddress) -> AsyncIterator[FleetKeeper]:
    """Run the workers that `[fleet]` asks for, until the block ends."""
    with keepers_lock(run_dir) as is_ours:
        if not is_ours:
            raise UserError(f"{run_dir}: another process keeps the workers of this run; wait for `polyrl up` to end")
        write_wanted(run_dir, None)  # a run that starts wants what its recipe says
        keeper = make_keeper(recipe, run_dir, address)
        try:
            await keeper.hear_offer(lambda line: log.warning("%s", line))
            with contextlib.suppress(ProviderError):  # said when it is tried again
                await keeper.adopt()
            goes = keeper.aim(keeper.wanted())
            await keeper.start_missing(lambda line: log.warning("%s", line))
            for name in goes:
                keeper.let_go(name, lambda line: log.info("%s", line), "no longer wanted")
            yield keeper
        finally:
            await keeper.end_all()
            await keeper.provider.close()


async def keep(keeper: FleetKeeper, fleet: Fleet, say: Say) -> None:
    """Keep the fleet until cancelled."""
    most, told = keeper.recipe.scaling.max_workers, None
    while True:
        offer = MarketOffer(most if keeper.offer is None else keeper.offer.num_workers, keeper.usd_per_hour)
        if offer != told and (keeper.offer is not None or keeper.recipe.scaling.enabled):
            there = [name for name, one in keeper.held.items() if one.is_there] if keeper.offer is not None else ()
            await fleet.tell_offer(min(most, offer.num_workers), keeper.usd_per_hour, there)
            told = offer
        advice = fleet.advice
        if advice is None:
            await keeper.look(say)
        else:
            await keeper.look(say, advice.num_workers, advice.let_go)
        await asyncio.sleep(_LOOK_EVERY_S)


async def until_joined(recipe: Recipe, fleet: Fleet, keeper: FleetKeeper) -> None:
    """Wait for all workers to join, with `fleet.wait`. Warn and return if time is up or one has ended."""
    until = time.monotonic() + (_JOIN_TIMEOUT_S if recipe.fleet.engine == "builtin" else _SERVER_TIMEOUT_S)
    while recipe.fleet.wait and set(keeper.expected) - {one.name for one in (await fleet.status()).workers}:
        if time.monotonic() > until or any(one.state == "ended" for one in keeper.held.values()):
            log.warning(
                "not all of the %d workers have joined; see the logs. The run begins without them", len(keeper.names)
            )
            return
        await asyncio.sleep(0.1)
