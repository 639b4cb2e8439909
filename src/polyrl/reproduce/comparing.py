"""A published figure beside ours, and what gathers such figures: checks, claims, tables, a section."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True)
class Check:
    """One published figure beside ours. Without a tolerance nothing passes or fails."""

    name: str
    published: float
    ours: float
    error: float
    tolerance: float | None
    shape: str
    more: tuple[str, ...] = ()
    points: bool = False
    """The error is a difference of shares."""
    table: str = ""
    """Where it stands."""

    @property
    def error_shown(self) -> str:
        return f"{100 * self.error:+.1f}{' points' if self.points else '%'}"

    @property
    def holds(self) -> bool | None:
        return None if self.tolerance is None else abs(self.error) <= self.tolerance


@dataclass(frozen=True)
class Claim:
    """A direction instead of a figure."""

    text: str
    holds: bool


@dataclass(frozen=True)
class Table:
    title: str
    header: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True)
class Curve:
    """A picture of its own: lines by name, each as its x and y."""

    title: str
    x: str
    y: str
    lines: Mapping[str, tuple[Sequence[float], Sequence[float]]]


@dataclass
class Section:
    title: str
    about: str
    """The figures that the model was calibrated on, and how this one is measured."""
    tables: list[Table] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    claims: list[Claim] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)
    misfits: list[str] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)

    def compare(self, title: str, checks: list[Check], more: Sequence[str] = ()) -> None:
        header = ("", "published", "ours", "error", "within", *more)
        self.tables.append(Table(title, header, [check_row(check) for check in checks]))
        self.checks += [replace(check, table=title.partition(",")[0]) for check in checks]

    @property
    def holds(self) -> bool:
        """Every figure with a tolerance is within it."""
        return all(check.holds is not False for check in self.checks)

    def claim(self, text: str, *, holds: bool) -> None:
        self.claims.append(Claim(text, holds))


def relative(
    name: str,
    published: float,
    ours: float,
    tolerance: float | None = None,
    *,
    shape: str = ".2f",
    more: tuple = (),
) -> Check:
    return Check(name, published, ours, ours / published - 1, tolerance, shape, more)


def in_points(name: str, published: float, ours: float, tolerance: float | None, more: tuple = ()) -> Check:
    """Shares: their error is a difference."""
    return Check(name, published, ours, ours - published, tolerance, ".0%", more, points=True)


def check_row(check: Check) -> list[str]:
    verdict = "-" if check.tolerance is None else f"{check.tolerance:.0%}: {'yes' if check.holds else '**no**'}"
    figures = f"{check.published:{check.shape}}", f"{check.ours:{check.shape}}"
    return [check.name, *figures, check.error_shown, verdict, *check.more]


def times(ratio: float) -> str:
    return f"{ratio:.2f}x"
