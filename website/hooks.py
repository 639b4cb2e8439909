"""Hooks of mkdocs: pages that live at the root of the repository, and links to files that are no pages.

A page reads the same in the repository and on the site. So its links stay as they are in the repository, and are
rewritten while the site is built: a link to a page of the root leads to its copy, a link to code leads to a copy of the
file as plain text, a link to a folder of code becomes its name alone.
"""

import os.path
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
ROOT_PAGES = {
    "ARCHITECTURE.md": "about/architecture.md",
    "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "about/contributing.md",
    "STYLE.md": "about/style.md",
    "README.md": "about/readme.md",
    "benchmarks/README.md": "about/benchmarks.md",
    "tests/conformance/README.md": "about/conformance.md",
}
"""Pages outside docs/, and where the site has them."""
_LINK = r"(?P<image>!?)\[(?P<words>(?:[^\[\]]|\[[^\]]*\])*)\]\(<?(?P<target>[^)\s>]+)>?(?P<title>(?:\s+\"[^\"]*\")?)\)"
_PIECE = re.compile(rf"^(?:```|~~~).*?^(?:```|~~~)[^\n]*$|{_LINK}|`(?:[^`\n]|\n(?!\n))*`", re.MULTILINE | re.DOTALL)
"""A fence, a link, or code: a link in code is none."""
_SHIM = "assets/iframe-worker.js"
"""Lets the search work in pages that are opened from the disk. The theme would fetch it from another server."""
_SHIM_ELSEWHERE = "https://unpkg.com/iframe-worker/shim"
_READ_FIRST = ("guides", "concepts")
"""Folders whose pages explain a word: a search shows them above results and logs that use it."""
_WEB = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)


def slug(text: str, separator: str) -> str:
    """Return the anchor of a heading, made the way that the common hosts of repositories make it."""
    return re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", separator)


def on_config(config: MkDocsConfig) -> MkDocsConfig:
    """Write the pages out that the navigation names by their folder."""
    config.nav = [*expanded(config.nav or [], Path(config.docs_dir))]
    return config


def expanded(nav: Sequence[Any], docs: Path) -> Iterator[Any]:
    """Yield the entries of a navigation; "folder/*" stands for the pages of a folder that have no entry beside it."""
    named = {one for one in nav if isinstance(one, str)}
    for one in nav:
        if isinstance(one, dict):
            yield {words: list(expanded(pages, docs)) for words, pages in one.items()}
        elif one.endswith("/*"):
            found = sorted(path.relative_to(docs).as_posix() for path in docs.glob(f"{one}.md"))
            yield from (path for path in found if path not in named)
        else:
            yield one


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root, and copies of the files that any page links to."""
    copies: set[str] = set()
    for source, place in ROOT_PAGES.items():
        text = (ROOT / source).read_text(encoding="utf-8")
        files.append(File.generated(config, place, content=text))
        copies.update(_files_of(text, source))
    for file in list(files.documentation_pages()):
        if file.abs_src_path is not None:
            copies.update(_files_of(file.content_string, f"docs/{file.src_uri}"))
    files.append(File.generated(config, _SHIM, content=(ROOT / "website/vendor/iframe-worker.js").read_bytes()))
    for path in sorted(copies):
        files.append(File.generated(config, _place_of_copy(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite the links of a page for its place on the site, and say how much its words count in a search."""
    del config, files
    if page.file.src_uri.split("/")[0] in _READ_FIRST:
        page.meta["search"] = {"boost": 3}
    return rewrite_links(markdown, page.file.src_uri)


def on_post_template(output_content: str, template_name: str, config: MkDocsConfig) -> str:
    """Do the same in pages that are made from no Markdown, such as 404.html."""
    del template_name, config
    return output_content.replace(_SHIM_ELSEWHERE, _SHIM)


def rewrite_links(markdown: str, place: str) -> str:
    """Return the page with links that hold on the site, where it is at `place`."""
    sources = {there: source for source, there in ROOT_PAGES.items()}
    source = sources.get(place, f"docs/{place}")

    def replaced(match: re.Match[str]) -> str:
        if match["target"] is None:
            return match[0]
        there = _target_on_site(match["target"], source, place)
        return match["words"] if there is None else f"{match['image']}[{match['words']}]({there}{match['title']})"

    return _PIECE.sub(replaced, markdown)


def _target_on_site(target: str, source: str, place: str) -> str | None:
    """Return where the link leads on the site; None where the site has no such page."""
    if _WEB.match(target) or target.startswith("#"):
        return target
    path, _, anchor = target.partition("#")
    whole = _inside(path, source)
    if whole in ROOT_PAGES:
        there = ROOT_PAGES[whole]
    elif whole == "docs" or whole.startswith("docs/"):
        there = "/".join(whole.split("/")[1:])
        if (ROOT / whole).is_dir():
            if not (ROOT / whole / "README.md").is_file():
                return None
            there = f"{there}/README.md".lstrip("/")
    elif (ROOT / whole).is_file():
        there = _place_of_copy(whole)
    elif (ROOT / whole).is_dir():
        return None
    else:
        there = whole  # mkdocs reports it
    return os.path.relpath(there, PurePosixPath(place).parent) + (f"#{anchor}" if anchor else "")


def _files_of(text: str, source: str) -> set[str]:
    """Return the files outside docs/ that a page links to, and that are no pages themselves."""
    targets = [match["target"] for match in _PIECE.finditer(text) if match["target"] is not None]
    found = {_inside(target.partition("#")[0], source) for target in targets if _is_inner(target)}
    ours = {path for path in found if not path.startswith(("docs/", "..")) and path not in ROOT_PAGES}
    return {path for path in ours if (ROOT / path).is_file()}


def _is_inner(target: str) -> bool:
    return not _WEB.match(target) and not target.startswith("#")


def _inside(path: str, source: str) -> str:
    return os.path.normpath(PurePosixPath(source).parent / path)


def _place_of_copy(path: str) -> str:
    return f"code/{path}.txt"


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    """Take the script that the theme would fetch from another server from the site itself."""
    del config
    return output.replace(_SHIM_ELSEWHERE, os.path.relpath(_SHIM, PurePosixPath(page.file.dest_uri).parent))
