"""The pages hold together: every relative link of every page leads to a file, and every #anchor to a heading.

Links to the web are left out: a test does not depend on somebody else's server.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SKIPPED_FOLDERS = {"build", "dist", "out", "node_modules"}

FENCE = re.compile(r"^(```|~~~).*?^\1[^\n]*$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"`[^`\n]*`")
LINK = re.compile(r"!?\[(?:[^\[\]]|\[[^\]]*\])*\]\(<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s+(\S+)", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.+?)\s*#*$", re.MULTILINE)
EXPLICIT_ANCHOR = re.compile(r"<a\s+(?:id|name)=\"([^\"]+)\"")
WEB = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def pages(root: Path = ROOT) -> list[Path]:
    def is_ours(path: Path) -> bool:
        folders = path.relative_to(root).parts[:-1]
        return not any(folder.startswith(".") or folder in SKIPPED_FOLDERS for folder in folders)

    return sorted(path for path in root.rglob("*.md") if is_ours(path))


def links(text: str) -> list[str]:
    """Where a page's links lead, without those to the web and those that stand in code."""
    prose = CODE.sub("", FENCE.sub("", text))
    return [target for target in [*LINK.findall(prose), *REFERENCE.findall(prose)] if not WEB.match(target)]


def anchors(text: str) -> set[str]:
    """The anchors of a page's headings, made the way that the common hosts make them."""
    text = FENCE.sub("", text)
    found = set(EXPLICIT_ANCHOR.findall(text))
    for heading in HEADING.findall(text):
        plain = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
        slug = re.sub(r"[^\w\- ]", "", plain).replace(" ", "-")
        copies = sum(1 for anchor in found if re.fullmatch(rf"{re.escape(slug)}(-\d+)?", anchor))
        found.add(f"{slug}-{copies}" if slug in found else slug)
    return found


def broken_links(page: Path) -> list[str]:
    text = page.read_text(encoding="utf-8")
    return [target for target in links(text) if not leads_somewhere(page, text, target)]


def leads_somewhere(page: Path, text: str, target: str) -> bool:
    path, _, anchor = target.partition("#")
    destination = page.parent / path if path else page
    if not destination.exists():
        return False
    if not anchor or destination.suffix != ".md":
        return True
    return anchor in anchors(text if not path else destination.read_text(encoding="utf-8"))


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page):
    assert broken_links(page) == []


def test_broken_links_are_found_and_good_ones_are_not(tmp_path):
    (tmp_path / "other.md").write_text("# Other page\n\n## Why `x=1`, twice\n")
    page = tmp_path / "page.md"
    page.write_text(
        "# Here\n[a](other.md) [b](other.md#why-x1-twice) [c](#here) [d](https://example.org/x) ![e](gone.png)\n"
        "[f](gone.md) [g](other.md#gone) [h](#gone) `[i](code.md)`\n```\n[j](fence.md)\n```\n[k]: gone-too.md\n"
    )
    assert broken_links(page) == ["gone.png", "gone.md", "other.md#gone", "#gone", "gone-too.md"]


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_what_depends_is_not_said_to_hang(page: Path):
    assert not re.search(r"\bhangs? on\b", CODE.sub("", FENCE.sub("", page.read_text())))
