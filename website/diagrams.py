"""The pictures of the concept pages, as SVG: boxes with arrows, or lanes over time.

`python -m website.pictures` writes docs/concepts/pictures/NAME.svg, one for each page; a test holds the files against
what is drawn here. Lines and letters are dark on a light ground, which the site inverts for its dark scheme.
"""

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

INK, LINE, GROUND, ACCENT = "#263238", "#607d8b", "#eceff1", "#ffccbc"
WIDTH, HEIGHT, GAP_X, GAP_Y, EDGE = 150, 50, 78, 42, 12
LANE_WIDTH, LANE_HEIGHT, LANE_GAP, NAMES = 470, 30, 12, 120


class Box(NamedTuple):
    column: float
    row: float
    text: str
    """Lines are divided by a slash."""
    strong: bool = False


class Arrow(NamedTuple):
    start: str
    end: str
    label: str = ""


class Boxes(NamedTuple):
    about: str
    boxes: dict[str, Box]
    arrows: Sequence[Arrow]


class Span(NamedTuple):
    start: float
    end: float
    text: str
    strong: bool = False


class Lanes(NamedTuple):
    about: str
    lanes: dict[str, Sequence[Span]]
    """By the name of a lane; times are from 0 to 100."""
    note: str = ""


def draw(picture: Boxes | Lanes) -> str:
    """Return the picture as an SVG file."""
    return _draw_boxes(picture) if isinstance(picture, Boxes) else _draw_lanes(picture)


def _draw_boxes(picture: Boxes) -> str:
    width = EDGE * 2 + max(_left(box) + WIDTH for box in picture.boxes.values())
    height = EDGE * 2 + max(_top(box) + HEIGHT for box in picture.boxes.values())
    arrows = [
        _arrow(picture.boxes[one.start], picture.boxes[one.end], one.label.split("/") if one.label else [])
        for one in picture.arrows
    ]
    boxes = [
        _box(_left(box), _top(box), WIDTH, HEIGHT, box.text.split("/"), box.strong) for box in picture.boxes.values()
    ]
    return _file(width, height, picture.about, [*arrows, *boxes])


def _draw_lanes(picture: Lanes) -> str:
    parts: list[str] = []
    for row, (name, spans) in enumerate(picture.lanes.items()):
        top = row * (LANE_HEIGHT + LANE_GAP)
        parts.append(_text(0, top + LANE_HEIGHT / 2 + 4, name, 12, "start"))
        for span in spans:
            left = NAMES + span.start * LANE_WIDTH / 100
            parts.append(
                _box(left, top, (span.end - span.start) * LANE_WIDTH / 100 - 2, LANE_HEIGHT, [span.text], span.strong)
            )
    height = len(picture.lanes) * (LANE_HEIGHT + LANE_GAP)
    for line in filter(None, picture.note.split("/")):
        height += 16
        parts.append(_text(NAMES, height - 4, line, 11, "start"))
    return _file(EDGE * 2 + NAMES + LANE_WIDTH, EDGE * 2 + height, picture.about, parts)


def _left(box: Box) -> float:
    return box.column * (WIDTH + GAP_X)


def _top(box: Box) -> float:
    return box.row * (HEIGHT + GAP_Y)


def _box(left: float, top: float, width: float, height: float, lines: Sequence[str], strong: bool) -> str:
    fill = ACCENT if strong else GROUND
    first = top + height / 2 + 4 - (len(lines) - 1) * 7.5
    texts = "".join(_text(left + width / 2, first + 15 * k, line, 12, "middle") for k, line in enumerate(lines))
    return (
        f'<rect x="{left:g}" y="{top:g}" width="{width:g}" height="{height:g}" rx="5" fill="{fill}" stroke="{LINE}"/>'
        f"{texts}"
    )


def _arrow(start: Box, end: Box, label: Sequence[str]) -> str:
    x1, y1, x2, y2 = _ends(start, end)
    line = (
        f'<line x1="{x1:g}" y1="{y1:g}" x2="{x2:g}" y2="{y2:g}" stroke="{LINE}" stroke-width="1.5"'
        ' marker-end="url(#tip)"/>'
    )
    across = abs(x2 - x1) >= abs(y2 - y1)
    anchor = "middle" if across else "start"
    x = (x1 + x2) / 2 + (0 if across else 7)
    first = (y1 + y2) / 2 + (-6 - 13 * (len(label) - 1) if across else 4 - 6.5 * (len(label) - 1))
    return line + "".join(_text(x, first + 13 * k, text, 11, anchor) for k, text in enumerate(label))


def _ends(start: Box, end: Box) -> tuple[float, float, float, float]:
    """Return where the arrow leaves one box and meets the other: at the sides that face each other."""
    a, b, c, d = _left(start), _top(start), _left(end), _top(end)
    if start.column != end.column:
        y1, y2 = b + HEIGHT / 2, d + HEIGHT / 2
        return (a + WIDTH, y1, c - 3, y2) if c > a else (a, y1, c + WIDTH + 3, y2)
    x1, x2 = a + WIDTH / 2, c + WIDTH / 2
    return (x1, b + HEIGHT, x2, d - 3) if d > b else (x1, b, x2, d + HEIGHT + 3)


def _text(x: float, y: float, text: str, size: int, anchor: str) -> str:
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" text-anchor="{anchor}" fill="{INK}">{escape(text)}</text>'


def _file(width: float, height: float, about: str, parts: Sequence[str]) -> str:
    tip = (
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        f'<path d="M0 0 8 4 0 8z" fill="{LINE}"/></marker></defs>'
    )
    body = "\n".join(parts)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}"'
        f' height="{height:g}" role="img" font-family="system-ui, sans-serif">\n<title>{escape(about)}</title>\n{tip}\n'
        f'<g transform="translate({EDGE} {EDGE})">\n{body}\n</g>\n</svg>\n'
    )
