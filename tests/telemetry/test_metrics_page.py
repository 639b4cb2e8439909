"""Names that the trainer writes are described, and the page of metrics has the labels of a step's line."""

import re
from pathlib import Path

from polyrl.telemetry.metric_names import HEADLINES, METRICS, describe

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "reference" / "metrics.md"
FAMILIES = sorted({metric.name.partition("/")[0] for metric in METRICS if "/" in metric.name})


def test_the_page_has_the_headlines_in_their_order():
    (block,) = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert [tuple(row.split()) for row in block.splitlines()] == list(HEADLINES.items())


def test_names_that_the_trainer_writes_in_full_are_described():
    name = re.compile(rf'"((?:{"|".join(FAMILIES)})/[a-z0-9_/@]+)"')
    package = ROOT / "src" / "polyrl"
    sources = sorted([*(package / "trainer").glob("*.py"), *(package / "cli" / "training").glob("*.py")])
    used = {found: source.name for source in sources for found in name.findall(source.read_text(encoding="utf-8"))}
    assert {one: where for one, where in used.items() if describe(one) is None} == {}
