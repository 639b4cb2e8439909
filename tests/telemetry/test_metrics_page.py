"""The page of metrics lists what the code has: each name once, with its unit and its meaning."""

import re
from pathlib import Path

from polyrl.telemetry.metric_names import HEADLINES, METRICS

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"


def test_the_page_has_exactly_the_metrics_of_the_code_in_their_order():
    rows = re.findall(r"^\| `([^`]+)` \| (.*?) ?\| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(metric.name, metric.unit, metric.meaning) for metric in METRICS]


def test_the_page_has_the_headlines_in_their_order():
    (block,) = re.findall(r"^```\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert block.split() == list(HEADLINES)
