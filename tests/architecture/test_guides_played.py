"""Every command of a guide is run by a test: it is played with its page, or a test of its own is named for it."""

from pathlib import Path

import pytest
from tests.integration.guide_sessions import ELSEWHERE, GUIDES, SESSIONS, commands, where_else

ROOT = Path(__file__).parents[2]
PAGES = sorted(path.stem for path in GUIDES.glob("*.md"))
PLAYED = {session.page for session in SESSIONS}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_of_a_guide_is_run_by_a_test(page: str):
    unplayed = [one.text for one in commands(page) if page not in PLAYED and where_else(page, one.text) is None]
    assert unplayed == []


def test_guides_show_commands():
    assert sum(len(commands(page)) for page in PAGES) > 100


@pytest.mark.parametrize("page", sorted(ELSEWHERE))
def test_a_test_that_is_named_for_commands_is_there(page: str):
    for words, where in ELSEWHERE[page].items():
        assert not where.startswith("tests/") or (ROOT / where).exists(), where
        assert any(where_else(page, one.text) == where for one in commands(page)), f"{page} has no {words}"
