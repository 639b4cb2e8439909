"""Markets of workers: a file that this machine plays, and a command that says what is offered."""

import asyncio
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.providers.test_local import kill_by_place

from polyrl.errors import ConfigError
from polyrl.providers.command import CommandProvider
from polyrl.providers.contract import ProviderContract, order_of
from polyrl.providers.local import LocalProvider
from polyrl.providers.market import MarketOffer, PricedProvider
from polyrl.providers.provider import HeldWorker, Provider, ProviderError, ProviderRun
from polyrl.providers.registry import make_provider, run_of


def supply(folder: Path, *lines: str) -> str:
    (folder / "supply.csv").write_text("\n".join(("at_s,workers,usd_per_hour", *lines)) + "\n")
    return str(folder / "supply.csv")


class TestLocalWithAMarket(ProviderContract):
    def provider(self, run):
        run.folder.parent.mkdir(parents=True, exist_ok=True)
        return LocalProvider(run, supply(run.folder.parent, "0,9,1"))

    async def kill(self, provider, run, name):
        await kill_by_place(provider, name)


async def until(provider: Provider, holds: Callable[[dict[str, HeldWorker]], bool]) -> None:
    deadline = time.monotonic() + 30.0
    while not holds(held := dict(await provider.held())):
        assert time.monotonic() < deadline, held
        await asyncio.sleep(0.05)


def test_a_market_takes_the_newest_worker_back_after_its_notice_and_offers_it_again(tmp_path: Path):
    run = ProviderRun("a-market", tmp_path / "shared", tmp_path / "logs")

    async def play() -> None:
        provider = LocalProvider(run, supply(tmp_path, "0,2,0.5", "4,1,0.5", "8,2,2.5"), notice_s=1.0)
        try:
            for name in ("worker-0", "worker-1"):
                await provider.start(order_of(run, name))
            assert await provider.offer() == MarketOffer(2, 0.5)
            with pytest.raises(ProviderError, match="worker-2 cannot be started: the market offers 2 workers"):
                await provider.start(order_of(run, "worker-2"))
            await until(provider, lambda held: held["worker-1"].state != "running")
            assert (await provider.held())["worker-0"].state == "running"
            await until(provider, lambda held: held["worker-1"].state == "ended")
            assert (await provider.held())["worker-1"].why == "its machine was taken back"
            with pytest.raises(ProviderError, match="the market offers 1 workers"):
                await provider.start(order_of(run, "worker-1"))
            while (await provider.offer()) != MarketOffer(2, 2.5):
                await asyncio.sleep(0.1)
            await provider.start(order_of(run, "worker-1"))
            await until(provider, lambda held: held["worker-1"].state == "running")
        finally:
            for name in await provider.held():
                await provider.stop(name)

    asyncio.run(play())


@pytest.mark.parametrize(
    ("args", "why"),
    [
        ({"supply": "nowhere.csv"}, "fleet.provider_args.supply: nowhere.csv: cannot be read"),
        ({"notice_s": 3}, "fleet.provider_args.notice_s: is for `supply`"),
        ({"supply": "supply.csv", "notice_s": -1}, "fleet.provider_args.notice_s: -1, expected 0 to 3600"),
        ({"supply": "dear.csv"}, "fleet.provider_args.supply: dear.csv: at 0 s: 2e+06 US dollars an hour"),
        ({"supply": "many.csv"}, "fleet.provider_args.supply: many.csv: at 0 s: 10001 workers"),
    ],
)
def test_a_market_that_is_none_is_one_line(
    args: dict[str, object], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name, line in (("supply", "0,1,1"), ("dear", "0,1,2e6"), ("many", "0,10001,1")):
        Path(f"{name}.csv").write_text(f"at_s,workers,usd_per_hour\n{line}\n")
    with pytest.raises(ConfigError, match=re.escape(why)):
        make_provider("local", args, run_of(tmp_path, ends_with_us=True))


@pytest.mark.parametrize(
    ("printed", "expected"),
    [
        ("6 1.85", MarketOffer(6, 1.85)),
        ("3", MarketOffer(3, None)),
        ("", "printed '', expected a number of workers"),
        ("6 1.85 x", "printed '6 1.85 x', expected"),
        ("many", "printed 'many', expected"),
        ("1 nan", "printed nan US dollars an hour, expected 0 to"),
        ("-1 2", "printed -1 workers, expected 0 to 10000"),
        ("9" * 5000, "expected a number of workers"),
    ],
)
def test_what_a_command_says_of_its_market_is_believed_within_bounds(
    printed: str, expected: MarketOffer | str, tmp_path: Path
):
    run = run_of(tmp_path, ends_with_us=True)
    provider = CommandProvider(run, "exec {command}", offer=f"printf %s '{printed}'")
    assert isinstance(provider, PricedProvider)
    if isinstance(expected, MarketOffer):
        assert asyncio.run(provider.offer()) == expected
        return
    with pytest.raises(ProviderError, match=re.escape(expected)):
        asyncio.run(provider.offer())
    assert asyncio.run(provider.offer()) is None, "it is asked again later, and nothing is known meanwhile"
