"""The reference pages' tables, made from the code: settings, options, routes, metrics, and the events of a journal.

`python -m website.reference` writes them, and `make docs` runs it. A test says which pages are not current.
"""

import ast
import importlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import get_args

import msgspec

from polyrl.cli.main import COMMANDS
from polyrl.cli.parser import Parser
from polyrl.config import recipe as r
from polyrl.engines.builtin.config import BuiltinConfig
from polyrl.manager import settings as m
from polyrl.manager.routes import ROUTES
from polyrl.scheduling.core import commands, events
from polyrl.scheduling.core import parameters as p
from polyrl.scheduling.rules.parallelism import DecodeSpeed, ModelShape
from polyrl.sim import scenario as s
from polyrl.telemetry.metric_names import METRICS, TOPICS
from website import tables

DOCS = Path(__file__).parents[1] / "docs"

Sections = Mapping[str, type[msgspec.Struct]]

RECIPE: Sections = {
    "model": r.ModelSection,
    "train": r.TrainSection,
    "algorithm": r.AlgorithmConfig,
    "algorithm.critic": r.CriticConfig,
    "optimizer": r.OptimizerConfig,
    "lora": r.LoraSection,
    "rollout": r.RolloutSection,
    "rollout.impose_lengths": r.ImposedLengthsSection,
    "data": r.DataSection,
    "data.domains": r.DomainSection,
    "data.arithmetic": r.ArithmeticTask,
    "validation": r.ValidationSection,
    "rewards": r.RewardsSection,
    "rewards.functions": r.WeightedReward,
    "environments": r.EnvironmentsSection,
    "fleet": r.FleetSection,
    "manager": r.ManagerSection,
    "weights": r.WeightsSection,
    "checkpoint": r.CheckpointSection,
    "track": r.TrackSection,
    "track.trackers": r.OwnTracker,
}
"""The sections of a recipe that its page has; the scheduler's own are on the page of scenarios."""
SCENARIO: Sections = {
    "run": s.RunSection,
    "trainer": s.TrainerSection,
    "engine": s.EngineSection,
    "fleet": s.SimFleetSection,
    "network": s.NetworkSection,
    "workload": s.WorkloadSection,
    "domains": s.SimDomainSection,
    "domains.reward": s.RewardSection,
    "domains.environment": s.SimEnvironmentSection,
    "hosts": s.SimHostsSection,
    "supply": s.SupplySection,
    "supply.events": s.SupplyEvent,
    "faults": s.FaultsSection,
    "rounds": p.RoundsConfig,
    "routing": p.RoutingConfig,
    "seeding": p.SeedingConfig,
    "hand_back": p.HandBackConfig,
    "parallelism": p.ParallelismConfig,
    "parallelism.model": ModelShape,
    "parallelism.speed": DecodeSpeed,
    "rewards": s.RewardConfig,
    "fleet_rules": p.FleetRules,
    "weight_delivery": p.WeightDeliveryConfig,
    "scaling": p.ScalingConfig,
    "environments": s.EnvironmentRules,
}
_KEYS = ("key", "value", "default", "means")


def pages() -> dict[Path, str]:
    """Return every page with generated tables, as it should be."""
    made = {
        DOCS / "reference/recipes.md": _with_settings("reference/recipes.md", RECIPE),
        DOCS / "reference/scenarios.md": _with_settings("reference/scenarios.md", SCENARIO),
        DOCS / "concepts/builtin-engine.md": _with_settings("concepts/builtin-engine.md", {"builtin": BuiltinConfig}),
        DOCS / "reference/manager.md": _manager(),
        DOCS / "reference/metrics.md": _metrics(),
        DOCS / "reference/cli.md": _cli(),
        DOCS / "reference/events.md": _events(),
    }
    return made


def sections_of(struct: type[msgspec.Struct]) -> dict[str, type[msgspec.Struct]]:
    """Return the keys of a struct that are structs themselves."""
    info = msgspec.inspect.type_info(struct)
    assert isinstance(info, msgspec.inspect.StructType)
    return {field.name: field.type.cls for field in info.fields if isinstance(field.type, msgspec.inspect.StructType)}


def parser_of(name: str, argv: Sequence[str] = ()) -> Parser:
    """Return the parser of a command, for these arguments."""
    parser = Parser(argv, prog=f"polyrl {name}")
    importlib.import_module(COMMANDS[name].module).add_arguments(parser)
    return parser


def _with_settings(name: str, sections: Sections) -> str:
    page = (DOCS / name).read_text(encoding="utf-8")
    for section, struct in sections.items():
        rows = tables.settings(struct)
        if struct is r.DomainSection:  # the keys that data has too are said once
            shared = {row[0] for row in tables.settings(r.DomainFields)}
            rows = [row for row in rows if row[0] not in shared]
        page = tables.with_table(page, f"### `{section}`\n", _KEYS, rows, keeps_meanings=True)
    return page


def _manager() -> str:
    sections = sections_of(m.ManagerSettings)
    page = _with_settings("reference/manager.md", sections)
    outside = [row for row in tables.settings(m.ManagerSettings) if row[0].strip("`") not in sections]
    page = tables.with_table(page, "### `manager`\n", _KEYS, outside, keeps_meanings=True)
    routes = [(f"`{one.method} {one.path}`", one.scope or "none", one.summary) for one in ROUTES]
    return tables.with_table(page, "## Routes\n", ("route", "scope", "does"), routes)


def _metrics() -> str:
    page = (DOCS / "reference/metrics.md").read_text(encoding="utf-8")
    rows: dict[str, list[tables.Row]] = {}
    topic = ""
    for metric in METRICS:
        topic = TOPICS.get(metric.name, topic)
        rows.setdefault(topic, []).append((f"`{metric.name}`", metric.unit, metric.meaning))
    for topic, of_topic in rows.items():
        page = tables.with_table(page, f"## {topic}\n", ("name", "unit", "meaning"), of_topic)
    return page


def _cli() -> str:
    page = (DOCS / "reference/cli.md").read_text(encoding="utf-8")
    for name in COMMANDS:
        if rows := tables.options(parser_of(name)):
            page = tables.with_table(page, f"## `polyrl {name}", ("option", "means"), rows, keeps_meanings=True)
    return page


def _events() -> str:
    told = [f"## Events\n\n{inspect.cleandoc(events.__doc__ or '')}\n"]
    told += [_struct(kind, events) for kind in _in_order(events.Event)]
    asked = [f"## Commands\n\n{inspect.cleandoc(commands.__doc__ or '')}\n"]
    asked += [_struct(kind, commands) for kind in _in_order(commands.Command)]
    return "\n".join([_EVENTS_BEGIN, *told, *asked])


def _in_order(union: object) -> list[type[msgspec.Struct]]:
    return sorted(get_args(union), key=lambda kind: inspect.getsourcelines(kind)[1])


def _struct(kind: type[msgspec.Struct], module: ModuleType) -> str:
    (tree,) = ast.parse(inspect.getsource(kind)).body
    assert isinstance(tree, ast.ClassDef)
    assert kind.__module__ == module.__name__
    docs = tables.attribute_docs(kind)
    rows = [
        (
            f"`{one.target.id}`",
            f"`{ast.unparse(one.annotation)}`".replace("|", "\\|"),
            "required" if one.value is None else f"`{ast.unparse(one.value)}`",
            docs.get(one.target.id, ""),
        )
        for one in tree.body
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)
    ]
    parts = [f"### `{kind.__name__}`\n"]
    if about := ast.get_docstring(tree):
        parts.append(f"{about}\n")
    if rows:
        parts.append(tables.lines(("field", "type", "default", "means"), rows))
    return "\n".join(parts)


_EVENTS_BEGIN = """\
# Events and commands

All that the [scheduler](../concepts/scheduler.md) is told, and all that it asks for. A [journal](journal.md) holds
every event in full, and a digest of the commands that followed.
This page is made from `scheduling/core/events.py` and `scheduling/core/commands.py`.
"""


def main() -> None:
    for path, text in pages().items():
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
