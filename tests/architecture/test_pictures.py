"""Every concept page has its picture, and the picture is what website/pictures.py says."""

from pathlib import Path

import pytest
from website.diagrams import draw
from website.pictures import FOLDER, PICTURES_BY_PAGE

PAGES = sorted(page for page in FOLDER.parent.glob("*.md") if page.stem != "README")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_a_concept_page_shows_its_picture(page: Path):
    about = PICTURES_BY_PAGE[page.stem].about
    assert f"![{about}](pictures/{page.stem}.svg)" in page.read_text(encoding="utf-8")


def test_the_pictures_are_what_the_script_draws():
    assert {path.stem: path.read_text(encoding="utf-8") for path in FOLDER.glob("*.svg")} == {
        name: draw(picture) for name, picture in PICTURES_BY_PAGE.items()
    }  # `python -m website.pictures` writes them
