"""Workers that a run keeps on the devices of its machine: each has its own, until it has ended."""

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from polyrl.config import build
from polyrl.config.dump import dump_toml
from polyrl.config.recipe import Recipe
from polyrl.errors import UserError
from polyrl.providers.market import MarketOffer
from polyrl.providers.provider import HeldWorker, ProviderError, WorkerOrder
from polyrl.run.devices_in_use import DevicesInUse
from polyrl.run.keeping import FleetKeeper, keepers_lock, read_wanted, write_wanted
from polyrl.run.processes import ManagerAddress
from polyrl.run.upping import Wish, bring_up

NO_MANAGER = ManagerAddress("http://127.0.0.1:1", 1, None)


class Machine:
    """A provider whose workers are entries, and end when the test lets them."""

    shares_files: ClassVar[bool] = True
    is_here: ClassVar[bool] = True

    def __init__(self) -> None:
        self.orders: dict[str, WorkerOrder] = {}
        self.may_end = asyncio.Event()
        self.may_end.set()

    def check(self) -> None: ...

    async def held(self) -> Mapping[str, HeldWorker]:
        return {name: HeldWorker(name, "running") for name in self.orders}

    async def start(self, order: WorkerOrder) -> None:
        self.orders.setdefault(order.name, order)

    async def stop(self, name: str) -> None:
        await self.may_end.wait()
        self.orders.pop(name, None)

    async def close(self) -> None: ...

    def devices(self) -> dict[str, str]:
        return {name: order.environment["CUDA_VISIBLE_DEVICES"] for name, order in sorted(self.orders.items())}


def recipe(**sections: Any) -> Recipe:
    fleet = {"workers": 2, "engine": "vllm", **sections.pop("fleet", {})}
    few = {"train": {"local_generation": False}, "validation": {"at_start": False}}
    model = {"path": "m", "device": "cuda"}
    return build(
        {"name": "r", "model": model, "data": {"source": "arithmetic"}, "fleet": fleet, **few, **sections}, Recipe
    )


def kept(wanted: Recipe, run_dir: Path, machine: Machine) -> FleetKeeper:
    run_dir.mkdir(exist_ok=True)
    (run_dir / "worker.token").write_text("t")
    return FleetKeeper(wanted, run_dir, NO_MANAGER, machine)


async def settle(keeper: FleetKeeper, advised: int | None = None, *goes: str) -> None:
    for _ in range(5):
        await keeper.look(lambda _: None, advised, goes)
        await asyncio.sleep(0.01)


class Spot(Machine):
    """A machine of a market that offers what it is told to."""

    offered: MarketOffer | None = MarketOffer(3, 0.5)

    async def offer(self) -> MarketOffer:
        if self.offered is None:
            raise ProviderError("nobody answers")
        return self.offered

    def prices(self) -> dict[str, str]:
        return {name: one.arguments[one.arguments.index("--price") + 1] for name, one in self.orders.items()}


def test_no_more_workers_start_than_the_market_offers_and_each_has_the_price_of_its_start(tmp_path: Path):
    async def play() -> None:
        machine = Spot()
        keeper = kept(recipe(fleet={"workers": 5, "price_usd_per_hour": 9.0}), tmp_path, machine)
        await settle(keeper)
        assert machine.prices() == dict.fromkeys(("worker-0", "worker-1", "worker-2"), "0.5")
        assert keeper.expected == ("worker-0", "worker-1", "worker-2"), "a run waits for no others"
        machine.offered = MarketOffer(4, 2.25)
        await settle(keeper)
        assert machine.prices()["worker-3"] == "2.25" and len(machine.orders) == 4
        machine.offered = MarketOffer(1, None)
        await settle(keeper)
        assert len(machine.orders) == 4, "a market takes machines back itself"
        machine.offered = MarketOffer(9, None)
        await settle(keeper)
        assert machine.prices()["worker-4"] == "9", "the recipe's"
        machine.offered = None
        await machine.stop("worker-0")
        await settle(keeper)
        assert "worker-0" not in keeper.held, "workers are kept, whether their market answers or not"

    asyncio.run(play())


WIDE = {"fleet": {"tensor_parallel": 2}, "scaling": {"enabled": True, "max_workers": 4}}
PLANNED = {"parallelism": {"enabled": True}}


def test_a_worker_has_devices_that_no_other_has_whoever_was_let_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    async def play() -> None:
        machine = Machine()
        keeper = kept(recipe(**WIDE), tmp_path, machine)
        await settle(keeper, 2)
        assert machine.devices() == {"worker-0": "1,2", "worker-1": "3,4"}
        machine.may_end.clear()
        await settle(keeper, 1, "worker-0")
        await settle(keeper, 2)
        assert machine.devices() == {"worker-0": "1,2", "worker-1": "3,4"}, "worker-0 hands over on its devices"
        machine.may_end.set()
        await settle(keeper, 2)
        assert machine.devices() == {"worker-1": "3,4", "worker-2": "1,2"}
        await settle(keeper, 3)
        assert machine.devices() == {"worker-1": "3,4", "worker-2": "1,2", "worker-3": "5,6"}

    asyncio.run(play())


def test_another_keeper_knows_whose_the_devices_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    async def play() -> None:
        machine = Machine()
        first = kept(recipe(**WIDE), tmp_path, machine)
        await settle(first, 2)
        await settle(first, 1, "worker-0")
        second = kept(recipe(**WIDE), tmp_path, machine)
        await second.adopt()
        await settle(second, 2)
        assert machine.devices() == {"worker-0": "1,2", "worker-1": "3,4"}

    asyncio.run(play())


def test_devices_are_counted_among_those_that_the_run_itself_may_see(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    async def play(visible: str) -> dict[str, str]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        machine, said = Machine(), []
        await kept(recipe(fleet={"tensor_parallel": 2}), tmp_path / visible, machine).look(
            lambda line: said.append(str(line))
        )
        assert len(said) == 2 - len(machine.orders)
        assert all("CUDA_VISIBLE_DEVICES has 3 devices, and a worker needs number 5" in line for line in said)
        return machine.devices()

    assert asyncio.run(play("3,4,5,6,7")) == {"worker-0": "4,5", "worker-1": "6,7"}
    assert asyncio.run(play("3,4,5")) == {"worker-0": "4,5"}


@pytest.mark.parametrize("said", (None, 1, 2, 4))
def test_with_the_planner_there_are_never_more_workers_than_its_devices_hold(tmp_path: Path, said: int | None):
    async def play() -> None:
        machine = Machine()
        keeper = kept(recipe(**PLANNED), tmp_path, machine)
        write_wanted(tmp_path, said)
        await settle(keeper)
        assert len(keeper.names) == len(machine.orders) == min(2, said or 2)
        await keeper.reshape(2)
        await settle(keeper)
        assert list(machine.devices().values()) == ["1,2"]
        await keeper.reshape(1)
        await settle(keeper)
        assert list(machine.devices().values()) == ["1", "2"][: said or 2]

    asyncio.run(play())


def test_a_wider_worker_waits_for_devices_that_are_still_in_use(tmp_path: Path):
    devices = DevicesInUse(tmp_path)
    assert devices.take("a", 1, 4, ())
    assert devices.take("b", 1, 4, ("a",))
    assert devices.take("c", 2, 4, ("a", "b"))
    assert not devices.take("d", 2, 4, ("a", "b", "c"))
    assert not devices.take("d", 2, 4, ("b", "c")), "half of what it needs is b's"
    assert devices.take("d", 2, 4, ("c",))
    assert (devices.of("d"), devices.of("c")) == (DevicesInUse(tmp_path).of("d"), DevicesInUse(tmp_path).of("c"))


def test_the_planner_beside_the_autoscaler_is_refused():
    with pytest.raises(UserError, match=r"scaling\.enabled: expected false with parallelism\.enabled"):
        recipe(**PLANNED, scaling={"enabled": True})


def test_up_says_that_there_are_no_devices_for_more_workers(tmp_path: Path):
    (tmp_path / "recipe.toml").write_text(dump_toml(recipe(**PLANNED)))
    wish = Wish(tmp_path, (), 3, is_auto=False, timeout_s=1.0)
    with pytest.raises(UserError, match=r"--workers: 3; expected at most 2: \[fleet\] has no more devices"):
        asyncio.run(bring_up(wish, print))
    with keepers_lock(tmp_path), pytest.raises(UserError, match=r"parallelism\.enabled says how many servers"):
        asyncio.run(bring_up(wish._replace(workers=1), print))
    assert read_wanted(tmp_path) is None
