"""A reproduction as text: its page for docs/results, the same for a terminal, and JSON."""

import os
import platform
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

from polyrl.bench.machine import commit, cpu
from polyrl.reproduce.comparing import Check, Section, Table

_FAR_OFF = 0.15
"""A figure without a tolerance that is farther off is named under what does not fit."""


class Provenance(NamedTuple):
    """Where a section's figures are from."""

    name: str
    place: str
    command: str
    num_seeds: int
    took_s: float
    """The seconds of its runs, one after the other."""
    commit: str

    def lines(self) -> list[str]:
        cores = len(os.sched_getaffinity(0))
        return [
            f"command: `{self.command}`; runs of a case: {self.num_seeds}{' or more' if self.place != 'gpu' else ''}; "
            f"they took {self.took_s:.0f} s, one after the other",
            f"commit: {self.commit}",
            f"machine: {cpu()}, {cores} cores, Python {platform.python_version()}",
            f"date: {time.strftime('%Y-%m-%d')}",
            *([f"load: {os.getloadavg()[2]:.1f} over the last quarter of an hour"] if self.place == "emulated" else []),
        ]


def state_of_source() -> str:
    """Return the commit that is about to be played."""
    found = commit()
    return "unknown" if found is None else found[:12] + (" with changes" if found.endswith("+") else "")


PLACES = {
    "simulation": "in the simulator: figures depend on scenario and seed alone, not on the machine",
    "gpu": "on this machine's GPU: only times mean something",
    "emulated": "with a real manager, real worker processes and emulated engines at a scaled clock",
}


def page(section: Section, origin: Provenance, pictures: Sequence[Path]) -> str:
    """Return the section as Markdown. Errors are relative to the published figure, for shares in points."""
    shown = "\n\n".join(f"![{section.title}]({path.name})" for path in pictures)
    parts = [
        f"# {origin.name}: {section.title}",
        f"Played {PLACES[origin.place]}. Errors are relative to the published figure, for shares in points.",
        bullets(origin.lines()),
        shown,
        section.about,
        *map(_markdown_table, section.tables),
        bullets([f"{'holds' if claim.holds else '**does not hold**'}: {claim.text}" for claim in section.claims]),
        *section.remarks,
    ]
    if wrong := misfits(section):
        parts += ["## What does not fit", bullets(wrong)]
    return "\n\n".join(part for part in parts if part) + "\n"


def text(section: Section, name: str, place: str) -> list[str]:
    """Return the section's lines for a terminal."""
    lines = [f"{name}: {section.title}, on {place}"]
    for table in section.tables:
        lines += ["", table.title, *_columns(table)]
    lines += [""] if section.claims else []
    lines += [f"{'holds' if claim.holds else 'DOES NOT HOLD'}: {claim.text}" for claim in section.claims]
    return lines


def tree(section: Section, name: str, place: str) -> dict[str, Any]:
    """Return the section as values for JSON."""
    values = asdict(section)
    values["checks"] = [{**asdict(check), "holds": check.holds} for check in section.checks]
    return {"name": name, "on": place, "holds": section.holds, **values, "misfits": misfits(section)}


def misfits(section: Section) -> list[str]:
    """List what fails, what is far off without failing, and what a section says of itself."""
    found = [
        f"{check.table}: {check.name}: published {check.published:{check.shape}}, ours {check.ours:{check.shape}} "
        f"({check.error_shown})."
        for check in section.checks
        if _is_off(check)
    ]
    found += [f"Does not hold: {claim.text}." for claim in section.claims if not claim.holds]
    return [*found, *section.misfits]


def _is_off(check: Check) -> bool:
    return check.holds is False or (check.holds is None and not check.points and abs(check.error) > _FAR_OFF)


def _filled(table: Table) -> list[list[str]]:
    lines = [list(table.header), *map(list, table.rows)]
    return [line + [""] * (len(table.header) - len(line)) for line in lines]


def _columns(table: Table) -> list[str]:
    lines = [[cell.replace("**", "") for cell in line] for line in _filled(table)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(table.header))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip() for line in lines]


def _markdown_table(table: Table) -> str:
    lines = _filled(table)
    widths = [max(3, *(len(line[column]) for line in lines)) for column in range(len(table.header))]
    shown = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) + " |" for line in lines
    ]
    rule = "|" + "|".join("-" * (width + 2) for width in widths) + "|"
    return "\n".join([f"**{table.title}**", "", shown[0], rule, *shown[1:]])


def bullets(texts: Sequence[str]) -> str:
    return "\n".join(f"- {one}" for one in texts)
