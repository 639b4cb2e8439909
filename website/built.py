"""Check the built site: `python -m website.built out/site`, which `make docs` runs after mkdocs.

mkdocs checks links between Markdown pages. This reads the HTML that a reader gets, where a theme, a hook or a list of
files that are left out has had its say: every link, picture, script and style leads to a file of the site, every anchor
to an element, and nothing is fetched from another server. Links to other sites are not followed.
"""

import sys
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from urllib.parse import unquote, urlsplit

_FETCHED = {"img": "src", "script": "src", "source": "src", "iframe": "src", "link": "href"}


class BuiltPage(NamedTuple):
    """What a page refers to, and what others may refer to in it."""

    links: list[str]
    fetched: list[str]
    """What a browser loads by itself."""
    anchors: set[str]


class _Reading(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.page = BuiltPage([], [], set())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = {name: value for name, value in attrs if value is not None}
        self.page.anchors.update(given[name] for name in ("id", "name") if name in given)
        if tag == "a" and "href" in given:
            self.page.links.append(given["href"])
        elif tag in _FETCHED and _FETCHED[tag] in given and given.get("rel") != "canonical":
            self.page.fetched.append(given[_FETCHED[tag]])


def read(html: str) -> BuiltPage:
    """Return a page's links and anchors."""
    reading = _Reading()
    reading.feed(html)
    reading.close()
    return reading.page


def mistakes(site: Path) -> Iterator[str]:
    """Yield a line for each link that leads nowhere, and for each thing that comes from another server."""
    pages = {path.relative_to(site).as_posix(): read(path.read_text(encoding="utf-8")) for path in site.rglob("*.html")}
    for name, page in sorted(pages.items()):
        for target in page.fetched:
            if urlsplit(target).netloc:
                yield f"{name}: {target} is on another server"
        for target in dict.fromkeys([*page.links, *page.fetched]):
            if why := _broken(target, name, site, pages):
                yield f"{name}: {target}: {why}"


def _broken(target: str, name: str, site: Path, pages: Mapping[str, BuiltPage]) -> str:
    """Return why a link leads nowhere; empty: it leads somewhere, or to another site."""
    parts = urlsplit(target)
    if parts.scheme or parts.netloc:
        return ""
    root = site.resolve()
    start = root if parts.path.startswith("/") else (root / name).parent  # 404.html has links from the root
    path = (start / unquote(parts.path).lstrip("/")).resolve() if parts.path else root / name
    path = path / "index.html" if path.is_dir() else path
    if not path.is_file() or not path.is_relative_to(root):
        return "no such file"
    page = pages.get(path.relative_to(root).as_posix())
    anchor = unquote(parts.fragment)
    return f"no anchor {anchor!r}" if anchor and page is not None and anchor not in page.anchors else ""


def main(site: Path) -> None:
    """Print what is wrong with a site, and end with 1 if anything is, or if no page is there."""
    if not any(site.rglob("*.html")):
        raise SystemExit(f"{site}: no built site is here; expected one from `make docs`")
    found = list(mistakes(site))
    print(*found, sep="\n", end="\n" if found else "")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
