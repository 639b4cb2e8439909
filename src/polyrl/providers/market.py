"""The offers of a provider's market: how many workers could be had in all, and the price of another one.

A provider that knows has a method `offer`. The keeper (run/keeping.py) asks it at every look, tells the autoscaler
what changed, starts no more workers than are offered, and ends none: a market takes machines back itself.
"""

import math
from pathlib import Path
from typing import Protocol, runtime_checkable

from msgspec import Struct

from polyrl.config.supply_trace import read_supply_trace
from polyrl.errors import ConfigError
from polyrl.ids import Seconds

MOST_WORKERS = 10_000
MOST_USD_PER_HOUR = 1e6


class MarketOffer(Struct, frozen=True):
    num_workers: int
    """In all, those that are held included."""
    usd_per_hour: float | None
    """Of each of them from now on; None: what the recipe says (`fleet.price_usd_per_hour`)."""


@runtime_checkable
class PricedProvider(Protocol):
    async def offer(self) -> MarketOffer | None:
        """Return what is offered now; None: not known. Raises ProviderError."""
        ...


class TraceMarket:
    """A market that a file plays, in seconds since the provider was made."""

    def __init__(self, path: str, key: str) -> None:
        """Raises ConfigError for a file that is none; `key` is the setting that names it."""
        try:
            self._levels = read_supply_trace(Path(path).expanduser())
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        for one in self._levels:
            if why := why_no_offer(one.workers, one.usd_per_hour):
                raise ConfigError(f"{key}: {path}: at {one.at_s:g} s: {why}")

    def at(self, elapsed_s: Seconds) -> MarketOffer:
        """Return what is offered then. Before the first line that is nothing, at no price of its own."""
        offer = MarketOffer(0, None)
        for one in self._levels:
            if one.at_s <= elapsed_s:
                price = offer.usd_per_hour if one.usd_per_hour is None else one.usd_per_hour
                offer = MarketOffer(one.workers, price)
        return offer


def why_no_offer(num_workers: int, usd_per_hour: float | None) -> str:
    """Return why no market offers that; empty if one may."""
    if not 0 <= num_workers <= MOST_WORKERS:
        return f"{num_workers} workers, expected 0 to {MOST_WORKERS}"
    if usd_per_hour is not None and not (math.isfinite(usd_per_hour) and 0 <= usd_per_hour <= MOST_USD_PER_HOUR):
        return f"{usd_per_hour:g} US dollars an hour, expected 0 to {MOST_USD_PER_HOUR:g}"
    return ""
