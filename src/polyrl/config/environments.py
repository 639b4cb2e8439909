"""The recipe's `[environments]`: processes that play the episodes of domains with an environment, and their limits."""

from typing import Annotated

from msgspec import Meta

from polyrl.scheduling.core.bounds import Count, NotNegative
from polyrl.scheduling.core.parameters import EnvironmentRules


class EnvironmentsSection(EnvironmentRules, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Host processes that are started beside the trainer, on its machine. Others join from anywhere."""

    processes: Count = 1
    """For each domain with an environment."""
    slots: Annotated[int, Meta(ge=1, le=65_536)] = 16
    """Episodes that one of them plays at once."""
    python: str = ""
    """The environment, or its Python, with the environment's package and PolyRL installed; empty: PolyRL's own."""
    price_usd_per_hour: NotNegative = 0.0
    """The price of one process, for the ledger."""

    @property
    def rules(self) -> EnvironmentRules:
        """The part that the scheduler decides by."""
        return EnvironmentRules(**{key: getattr(self, key) for key in EnvironmentRules.__struct_fields__})
