"""The site: each page has a place in its navigation, and what is checked of the built pages finds what is broken."""

from pathlib import Path

import pytest
from mkdocs.config import load_config
from website.built import main, mistakes
from website.hooks import ROOT_PAGES, expanded

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def test_every_page_of_the_docs_is_in_the_navigation_once():
    nav = expanded(load_config(str(ROOT / "mkdocs.yml")).nav or [], DOCS)
    named = list(_leaves(list(nav)))
    pages = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert sorted(named) == sorted({*named}), "twice"
    assert {*named} == pages | {*ROOT_PAGES.values()}


def _leaves(nav):
    for one in nav:
        yield from [one] if isinstance(one, str) else (leaf for pages in one.values() for leaf in _leaves(pages))


def test_a_folder_stands_for_its_other_pages_by_name(tmp_path):
    (tmp_path / "notes").mkdir()
    for name in ("b", "a", "first"):
        (tmp_path / "notes" / f"{name}.md").touch()
    nav = [{"Notes": ["notes/first.md", "notes/*"]}, "other.md"]
    assert list(expanded(nav, tmp_path)) == [{"Notes": ["notes/first.md", "notes/a.md", "notes/b.md"]}, "other.md"]


def page(site: Path, name: str, body: str) -> None:
    (site / name).parent.mkdir(parents=True, exist_ok=True)
    (site / name).write_text(f"<html><body>{body}</body></html>")


def test_links_of_a_built_page_that_lead_nowhere_are_found(tmp_path):
    page(
        tmp_path, "index.html", '<a href="notes/a.html#there">x</a> <a href="notes/a.html#gone">x</a> <a href="x.json">'
    )
    page(tmp_path, "notes/a.html", '<h2 id="there">x</h2> <a href="..">x</a> <img src="../gone.png"> <a href="#">x</a>')
    page(tmp_path, "404.html", '<a href="/notes/a.html">x</a> <script src="https://example.org/x.js"></script>')
    (tmp_path / "secret").write_text("beside the site")
    page(tmp_path / "site", "index.html", '<a href="../secret">x</a> <a href="https://example.org">x</a>')
    assert list(mistakes(tmp_path)) == [
        "404.html: https://example.org/x.js is on another server",
        "index.html: notes/a.html#gone: no anchor 'gone'",
        "index.html: x.json: no such file",
        "notes/a.html: ../gone.png: no such file",
    ]
    assert list(mistakes(tmp_path / "site")) == ["index.html: ../secret: no such file"]


def test_the_check_of_a_site_ends_with_1_and_a_line_for_each_mistake(tmp_path, capsys):
    page(tmp_path, "index.html", '<a href="gone.html">x</a>')
    with pytest.raises(SystemExit) as ended:
        main(tmp_path)
    assert ended.value.code == 1
    assert capsys.readouterr().out == "index.html: gone.html: no such file\n"


def test_the_check_of_a_folder_without_a_site_says_how_to_make_one(tmp_path):
    with pytest.raises(SystemExit, match="expected one from `make docs`"):
        main(tmp_path)
