"""A section as a picture: every figure of ours against the published one, and its curves below."""

from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.reproduce.comparing import Check, Curve, Section
from polyrl.telemetry.canvas import INK, PALE_INK, SEVERAL, new_figure, save, set_titles

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_ROW_INCHES = 0.28
_WIDTH_INCHES = 9.0


def draw(section: Section, path: Path) -> list[Path]:
    """Draw the section beside `path`, a file for its figures and one for each curve. Raises NoPlottingError."""
    drawn: list[Path] = []
    if section.checks:
        figure, axes = new_figure(_WIDTH_INCHES, 1.2 + _ROW_INCHES * len(section.checks))
        set_titles(axes, section.title, "", "ours / published", "")
        _draw_checks(axes, section.checks)
        save(figure, path)
        drawn.append(path)
    for number, curve in enumerate(section.curves, start=1):
        drawn.append(path.with_stem(f"{path.stem}-{number}"))
        figure, axes = new_figure(_WIDTH_INCHES, 2.6)
        set_titles(axes, curve.title, "", curve.x, curve.y)
        _draw_curve(axes, curve)
        save(figure, drawn[-1])
    return drawn


def _draw_checks(axes: "Axes", checks: list[Check]) -> None:
    rows = range(len(checks), 0, -1)
    axes.axvline(1.0, color=PALE_INK, linewidth=1)
    for row, check in zip(rows, checks, strict=True):
        if check.tolerance is not None:
            width = check.tolerance / (check.published if check.points else 1.0)
            axes.barh(row, 2 * width, left=1 - width, height=0.62, color="#dfeaf5")
        color = SEVERAL[1] if check.holds is False else SEVERAL[0] if check.holds else PALE_INK
        axes.plot(check.ours / check.published, row, "o", color=color, markersize=6)
    names = [f"{check.table}: {check.name}" for check in checks]
    axes.set_yticks(list(rows), names, fontsize=8, color=INK)
    axes.set_ylim(0.4, len(checks) + 0.6)  # else the marks of the first and the last row are cut in half


def _draw_curve(axes: "Axes", curve: Curve) -> None:
    for (name, (xs, ys)), color in zip(curve.lines.items(), SEVERAL, strict=False):
        axes.plot(xs, ys, "-", color=color, linewidth=1.6, label=name)
    axes.set_ylim(bottom=0)
