"""`polyrl reproduce NAME`: play a published result again, and show it beside what was published."""

import argparse
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from polyrl.cli.simulate import without_pictures
from polyrl.errors import UserError

if TYPE_CHECKING:
    from polyrl.reproduce.comparing import Section
    from polyrl.reproduce.names import Reproduction
    from polyrl.reproduce.page import Provenance
    from polyrl.reproduce.playing import Player

EXAMPLE = """\
examples:
  polyrl reproduce                                        what there is, and where it can be played
  polyrl reproduce tail-e2e                               in the simulator
  polyrl reproduce three-of-six --on emulated             real processes and emulated engines, at a scaled clock
  polyrl reproduce planner minimum --json --seeds 1
  polyrl reproduce elastic-8b --out docs/results/reproduced
  polyrl reproduce tail-e2e --on gpu --out found          step times of this machine's GPU, in a checkout

Files of --out: NAME-PLACE.md and, with matplotlib, NAME-PLACE.png. Exit code 1: a figure is outside its tolerance."""

_MOST_SPEEDUP = 1000.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("names", metavar="NAME", nargs="*", help="what to reproduce; none: list what there is")
    parser.add_argument(
        "--on", default="simulation", metavar="PLACE", help="simulation, emulated or gpu (default: %(default)s)"
    )
    parser.add_argument(
        "--seeds", type=int, metavar="N", help="runs of a case (default: 2 simulated, 1 emulated); not on gpu"
    )
    parser.add_argument("--processes", type=int, default=2, metavar="N", help="simulations at once (default: 2)")
    parser.add_argument(
        "--speedup", type=float, default=10.0, metavar="X", help="of the emulated clock (default: %(default)g)"
    )
    parser.add_argument("--out", metavar="DIR", type=Path, help="write a page and pictures there")
    parser.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    parser.add_argument("--no-progress", action="store_true", help="no progress on stderr")


def run(args: argparse.Namespace) -> int:
    from polyrl.reproduce.page import state_of_source

    if not args.names:
        return _list(as_json=args.json)
    for option, value in (("--seeds", args.seeds), ("--processes", args.processes), ("--speedup", args.speedup)):
        if value is not None and not value >= 1:
            raise UserError(f"{option}: {value:g}; expected at least 1")
    if args.speedup > _MOST_SPEEDUP:
        raise UserError(
            f"--speedup: {args.speedup:g}; expected at most {_MOST_SPEEDUP:g}: processes do not go that fast"
        )
    wanted = [(name, _find(name)) for name in dict.fromkeys(args.names)]
    for name, one in wanted:
        _check_place(name, one, args.on)
    if args.on == "gpu" and args.seeds is not None:
        raise UserError("--seeds: is not for --on gpu, where each mode is run once")
    if args.out is not None:
        _make(args.out)
    commit = state_of_source()
    if args.on == "gpu":
        sections = [(name, *_measured(one)) for name, one in wanted]
    else:
        with _player(args) as player:
            sections = [(name, *_played(one, args, player)) for name, one in wanted]
    for name, section, took_s in sections:
        if args.out is not None:
            _write(args.out, section, _origin(args, name, took_s, commit))
    _show(sections, args.on, as_json=args.json)
    return int(not all(section.holds for _, section, _ in sections))


def _list(*, as_json: bool) -> int:
    from polyrl.reproduce.names import PLACES, REPRODUCTIONS

    found = {
        name: {"about": one.about, "on": [place for place in PLACES if not isinstance(getattr(one, place), str)]}
        for name, one in REPRODUCTIONS.items()
    }
    if as_json:
        print(json.dumps(found, indent=2))
        return 0
    width = max(map(len, found))
    for name, one in found.items():
        print(f"{name:<{width}}  {one['about']}\n{'':<{width}}  on {', '.join(one['on'])}")
    return 0


def _find(name: str) -> "Reproduction":
    from polyrl.config.explain import did_you_mean
    from polyrl.reproduce.names import REPRODUCTIONS

    if name not in REPRODUCTIONS:
        hint = did_you_mean(name, REPRODUCTIONS) or f"expected one of {', '.join(REPRODUCTIONS)}"
        raise UserError(f"NAME: {name!r} is unknown; {hint}")
    return REPRODUCTIONS[name]


def _check_place(name: str, one: "Reproduction", place: str) -> None:
    from polyrl.reproduce.names import PLACES

    if place not in PLACES:
        raise UserError(f"--on: {place!r} is no place; expected one of {', '.join(PLACES)}")
    found = getattr(one, place)
    if isinstance(found, str):
        raise UserError(f"{name} cannot be played on {place}: {found}")


@contextmanager
def _player(args: argparse.Namespace) -> "Iterator[Player]":
    from polyrl.reproduce.emulation.play import Emulator
    from polyrl.reproduce.playing import Simulator, simulators

    began = time.monotonic()

    def told(done: int, total: int) -> None:
        if not args.no_progress:
            print(f"polyrl: {done} of {total} runs, {time.monotonic() - began:.0f} s", file=sys.stderr)

    if args.on == "emulated":
        yield Emulator(args.seeds or 1, args.speedup, told)
        return
    with simulators(args.processes) as run_all:
        yield Simulator(run_all, args.seeds or 2, told)


def _played(one: "Reproduction", args: argparse.Namespace, player: "Player") -> "tuple[Section, float]":
    from polyrl.reproduce.emulation.beside import Beside
    from polyrl.reproduce.playing import Timed

    timed = Timed(player)
    if args.on == "simulation":
        return one.simulation(timed), timed.took_s
    assert not isinstance(one.emulated, str), "its place was checked"
    beside = Beside(timed, args.speedup)
    section = one.emulated(beside)
    beside.tell(section)
    return section, timed.took_s


def _measured(one: "Reproduction") -> "tuple[Section, float]":
    from polyrl.reproduce.measured import run as run_modes

    assert not isinstance(one.gpu, str), "its place was checked"
    runs = run_modes(one.gpu.modes, lambda line: print(line, file=sys.stderr))
    return one.gpu.section(runs), sum(run.run_s for run in runs.values())


def _origin(args: argparse.Namespace, name: str, took_s: float, commit: str) -> "Provenance":
    from polyrl.reproduce.page import Provenance

    seeds = args.seeds or (2 if args.on == "simulation" else 1)
    speed = f" --speedup {args.speedup:g}" if args.on == "emulated" else ""
    num = f" --seeds {seeds}" if args.on != "gpu" else ""
    command = f"polyrl reproduce {name} --on {args.on}{num}{speed}"
    return Provenance(name, args.on, command, seeds, took_s, commit)


def _make(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"--out: {folder}: no folder can be made there: {error.strerror}") from error


def _write(folder: Path, section: "Section", origin: "Provenance") -> None:
    from polyrl.reproduce.page import page
    from polyrl.reproduce.picture import draw

    path = folder / f"{origin.name}-{origin.place}.md"
    pictures: list[Path] = []
    with without_pictures():
        pictures = draw(section, path.with_suffix(".png"))
    path.write_text(page(section, origin, pictures), encoding="utf-8")


def _show(sections: "list[tuple[str, Section, float]]", place: str, *, as_json: bool) -> None:
    from polyrl.reproduce.page import text, tree

    if as_json:
        print(json.dumps([tree(section, name, place) for name, section, _ in sections], indent=2))
        return
    for name, section, _ in sections:
        print("\n".join([*text(section, name, place), ""]))
