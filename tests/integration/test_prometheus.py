"""The names that Prometheus gets: a live manager's, the page's and the Grafana dashboard's are the same."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from tests.integration import test_episodes as episodes
from tests.integration.live import honest_worker, manager, play_round, run, trainer, until

from polyrl.manager.prometheus import metrics

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"
NAME = re.compile(r"\bpolyrl_[a-z_]+")
SUFFIX = re.compile(r"(_total|_created)$")


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> str:
    """What a manager with a worker, a host and an open round says, and what one says with nothing."""
    folder = tmp_path_factory.mktemp("prometheus")

    async def scenario() -> str:
        async with (
            manager(folder) as live,
            trainer(live, episodes.CONFIG, prompts=episodes.prompt_of, answers=episodes.MODEL) as fleet,
            honest_worker(live),
            episodes.host(live, episodes.EchoEnvironment()),
        ):
            await fleet.publish(0)
            await play_round(fleet, 0)
            await fleet.publish(1)
            await fleet.request(1)
            await until(lambda: bool(live.service.lobby.need_run().desk.rounds), "a round is open")
            return metrics(live.service.lobby, live.service.uptime_s).decode()

    return run(scenario())


def names_in(text: str) -> set[str]:
    return {SUFFIX.sub("", name) for name in NAME.findall(text)}


def families(text: str) -> set[str]:
    return {SUFFIX.sub("", name) for name in re.findall(r"^# TYPE (\S+)", text, re.M)}


def test_the_page_and_what_is_exported_name_the_same(exported: str):
    page = (REFERENCE / "manager.md").read_text(encoding="utf-8")
    assert names_in(page.partition("## Metrics")[2].partition("\n## ")[0]) == families(exported)


def test_every_expression_of_the_dashboard_is_of_names_that_are_exported(exported: str):
    board = json.loads((REFERENCE / "grafana.json").read_text(encoding="utf-8"))
    expressions = [target["expr"] for panel in board["panels"] for target in panel["targets"]]
    assert len(expressions) >= 20
    for expression in expressions:
        assert names_in(expression) and names_in(expression) <= families(exported), expression
    places = [tuple(panel["gridPos"].values()) for panel in board["panels"]]
    assert len(set(places)) == len(places) and len({panel["id"] for panel in board["panels"]}) == len(places)
    legends = [target["legendFormat"] for panel in board["panels"] for target in panel["targets"]]
    labels = {label for legend in legends for label in re.findall(r"{{(\w+)}}", legend)}
    assert labels <= set(re.findall(r'[{,](\w+)="', exported)) | {"cause", "reason"}, "a label that nothing has"


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed: apt-get install prometheus")
def test_prometheus_own_tool_reads_it(exported: str):
    told = subprocess.run(["promtool", "check", "metrics"], input=exported, capture_output=True, text=True, check=False)
    complaints = [line for line in told.stderr.splitlines() if "should" not in line]  # its taste in names
    assert told.returncode in (0, 3) and complaints == [], told.stderr
