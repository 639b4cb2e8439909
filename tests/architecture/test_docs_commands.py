"""Commands that pages show can be typed: the parser takes them, and recipes, scenarios, keys and files are there.

Read are the lines of code blocks that begin with `polyrl` or `$ polyrl`. Files of a reader's own (`mine.toml`) stand
for themselves: the keys given with them are tried on a recipe, or a scenario, that ships. Left out: commands that the
page shows to be refused, and running them, which takes models and minutes.
"""

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
from tests.architecture.test_docs_links import pages
from website.reference import parser_of

from polyrl.cli.main import COMMANDS
from polyrl.config.recipe_files import list_recipes, load_recipe
from polyrl.errors import UserError
from polyrl.sim.library import list_scenarios, load_scenario

ROOT = Path(__file__).parents[2]
FENCE = re.compile(r"^```\w*\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINE = re.compile(r"^(?:\$ )?polyrl (?!\[)(.+)$")
SHELL = {">", ">>", "2>", "<", "|", "&", "&&", ";", "...", "#"}
OWN = re.compile(r"(mine|recipe|agent|same|my)\.toml$")
"""Files that a reader writes, as the page shows or as their own."""


class Shown(NamedTuple):
    page: str
    words: list[str]


def commands(page: str, text: str) -> list[Shown]:
    """Return the commands of a page's code blocks, without what the shell does with them and what is said of them."""
    found = []
    for block in FENCE.findall(text):
        lines = block.replace("\\\n", " ").splitlines()
        for line, below in zip(lines, [*lines[1:], ""], strict=True):
            if (match := LINE.match(line)) and not below.startswith("polyrl: error:"):
                said = re.split(r"\s{3,}| # ", match[1])[0]
                found.append(Shown(page, _words(said)))
    return found


def _words(command: str) -> list[str]:
    words = shlex.split(command)
    ends = [k for k, word in enumerate(words) if word in SHELL or re.match(r"\d?>", word)]
    return words[: min(ends, default=len(words))]


def mistake(shown: Shown) -> str:
    """Return what is wrong with the command; empty: nothing."""
    name, *rest = shown.words
    if name.startswith("-"):
        return ""
    if name not in COMMANDS:
        return f"no command {name!r}"
    parser = parser_of(name, rest)
    argv = rest[: rest.index("--")] if "--" in rest and parser.get_default("rest") is not None else rest
    try:
        args = vars(parser.parse_intermixed_args(argv))
        _look_up(name, args)
    except UserError as error:
        return str(error)
    return ""


def _look_up(name: str, args: dict[str, object]) -> None:
    """Load the recipe or scenario that a command names, with its overrides. Raises ConfigError."""
    overrides = [str(one) for one in _list(args.get("overrides") or args.get("settings"))]
    if name == "train" and args.get("recipe"):
        overrides += [f"train.ranks={args['ranks']}"] if args.get("ranks") else []
        load_recipe(_ours(str(args["recipe"]), "arithmetic"), overrides)
    if name in ("simulate", "plan") and args.get("scenario"):
        scenario = "elastic-8b" if "supply" in " ".join(overrides) else "tail-7b-8k"
        traces = [one for one in overrides if not one.startswith("supply.trace=")]
        load_scenario(_ours(str(args["scenario"]), scenario), traces)


def _list(value: object) -> list[object]:
    return list(value) if isinstance(value, list | tuple) else []


def _ours(name: str, stand_in: str) -> str:
    return stand_in if OWN.search(name) else str(ROOT / name) if name.endswith(".toml") else name


SHOWN = [one for page in pages() for one in commands(page.stem, page.read_text(encoding="utf-8"))]


def test_pages_show_commands():
    assert len(SHOWN) > 100
    assert list_recipes()
    assert list_scenarios()


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: f"{shown.page}: {' '.join(shown.words)}"[:70])
def test_a_command_of_a_page_can_be_typed(shown: Shown):
    assert mistake(shown) == ""


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("polyrl trian arithmetic", "no command 'trian'"),
        ("polyrl train arithmetic --rank 4 --foo 1", "--foo: unknown option"),
        ("polyrl train arithmtic", "did you mean arithmetic?"),
        ("$ polyrl train mine.toml train.step=3", "train.step: unknown key"),
        ("polyrl simulate elastic-9b >log 2>&1 &", "did you mean elastic-8b?"),
    ],
)
def test_a_command_with_a_mistake_is_found(line, said):
    (shown,) = commands("a page", f"```\n{line}\n```\n")
    assert said in mistake(shown)
