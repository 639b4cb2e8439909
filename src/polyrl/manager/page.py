"""The files of the dashboard's page, and the headers that all of its answers have.

Rules kept here: the page holds nothing of a run, so it needs no token. Its content security policy lets the browser
run and load only what is served here, and lets no other page frame it. The files are read once, so that requests of
strangers cost no disk access.
"""

from functools import cache
from pathlib import Path

from aiohttp import web

from polyrl.errors import PolyrlError

FOLDER = Path(__file__).parents[1] / "dashboard" / "page"
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-store",
}
_TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}


class NoSuchPart(PolyrlError):
    """The page has no file of that name."""


def part(name: str = "index.html") -> web.Response:
    """Return a file of the page. Raises NoSuchPart."""
    body = _parts().get(name)
    if body is None:
        raise NoSuchPart(f"the page has no part {name[:80]!r}")
    kind = _TYPES[Path(name).suffix]
    return web.Response(body=body, content_type=kind, charset="utf-8", headers=HEADERS)


@cache
def _parts() -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(FOLDER.iterdir()) if path.suffix in _TYPES}
