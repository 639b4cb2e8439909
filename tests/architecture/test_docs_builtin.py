"""The page of the builtin engine lists every setting with its range and default, and names every family that runs."""

from pathlib import Path

from tests.architecture.settings_tables import rows_of, should_be

from polyrl.engines.builtin.config import BuiltinConfig

PAGE = Path(__file__).parents[2] / "docs" / "concepts" / "builtin-engine.md"


def test_the_page_has_every_setting_with_its_values_and_default():
    assert rows_of(PAGE, "builtin") == should_be(BuiltinConfig)
