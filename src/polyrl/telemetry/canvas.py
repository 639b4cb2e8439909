"""An empty picture in our looks, and what goes around one: titles, legends, whole numbers, the file.

matplotlib is an extra (`pip install 'polyrl[plot]'`); it is imported when the first picture is drawn. Figures are made
without pyplot: no window, no state that is shared. Left out: what is drawn (sim/pictures.py, telemetry/pictures.py).
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrl.errors import PolyrlError
from polyrl.telemetry.looks import ACTIVITIES, LEFT

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INK = "#30343a"
PALE_INK = "#6b727b"
GRID = "#e4e7eb"
SEVERAL = ("#3a86c8", "#d55e00", "#009e73", "#cc79a7", "#c9b400", "#6b727b")
"""For things that are told apart by nothing but their colour."""

_DPI = 130


class NoPlottingError(PolyrlError):
    """matplotlib is not installed."""


def new_figure(width: float, height: float) -> "tuple[Figure, Axes]":
    """Make an empty figure in our looks, without pyplot and its global state. Raises NoPlottingError."""
    figure, (axes,) = new_panels(width, height, 1)
    return figure, axes


def new_panels(width: float, height: float, num_panels: int) -> "tuple[Figure, list[Axes]]":
    """Make the same with several panels beside each other, which share their vertical axis."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise NoPlottingError("no pictures without matplotlib: pip install 'polyrl[plot]'") from error
    figure = Figure(figsize=(width, height), layout="constrained")
    panels: list[Axes] = [*figure.subplots(1, num_panels, sharey=True, squeeze=False)[0]]
    for axes in panels:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        for side in ("left", "bottom"):
            axes.spines[side].set_color("#9aa0a8")
        axes.tick_params(colors=INK, labelsize=9)
        axes.set_axisbelow(True)
    return figure, panels


def save(figure: "Figure", path: Path) -> None:
    figure.savefig(path, dpi=_DPI, facecolor="white", bbox_inches="tight", pad_inches=0.2)


def set_titles(axes: "Axes", title: str, about: str, x: str, y: str) -> None:
    axes.set_title(title, loc="left", fontsize=12, fontweight="bold", color=INK, pad=22 if about else 8)
    if about:
        axes.text(0.0, 1.012, about, transform=axes.transAxes, fontsize=9, color=PALE_INK, va="bottom")
    axes.set_xlabel(x, color=INK, fontsize=10)
    axes.set_ylabel(y, color=INK, fontsize=10)


def whole_numbers(axes: "Axes") -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))


def legend_below(axes: "Axes", num_columns: int = 4) -> None:
    axes.figure.legend(loc="outside lower center", ncols=num_columns, frameon=False, fontsize=9)


def activity_legend(figure: "Figure", seen: Iterable[str], marks: Sequence[Any] = ()) -> None:
    """Explain the colours of a timeline that are there to be seen, with handles for `marks` beside them."""
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    present = set(seen)
    handles: list[Any] = [
        Line2D([], [], marker="x", linestyle="", markeredgewidth=2, color=look.colour, label=look.words)
        if activity == LEFT
        else Patch(color=look.colour, label=look.words)
        for activity, look in ACTIVITIES.items()
        if activity in present
    ] + [*marks]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False, fontsize=9)
