"""`polyrl rewards`: score a file of answers with a recipe's rewards, before or after a run."""

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrl.errors import UserError, plain

if TYPE_CHECKING:
    from polyrl.run.answers import ScoredLine

EXAMPLE = """\
examples:
  polyrl rewards recipe.toml answers.jsonl
  polyrl rewards recipe.toml answers.jsonl --json rewards.timeout_s=5

FILE has a JSON object a line: {"prompt": 3, "answer": "1+2=3"}, with the number of a prompt of the recipe's data, or
{"row": {...}, "answer": "..."}, with the columns of a row; {"domain": "code", ...} where the recipe has several.
An episode has its calls, and its environment's reward: {"prompt": 3, "calls": [{"given": "...", "drawn": "..."}, ...],
"reward": 0.5}. Answers to the same prompt form a group, for rewards of whole groups.

The exit code is 1 if a reward failed."""

_LIMIT = 20
_BINS = 10
_BAR = 40


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe that ships, or a file")
    parser.add_argument("file", metavar="FILE", help="answers, one JSON object a line")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="settings of the recipe")
    parser.add_argument("--limit", type=int, default=_LIMIT, metavar="N", help=f"rows of the table (default: {_LIMIT})")
    parser.add_argument("--json", action="store_true", help="one line an answer, for machines")


def run(args: argparse.Namespace) -> int:
    from polyrl.config.recipe_files import load_recipe
    from polyrl.run.answers import score_answers
    from polyrl.run.event_loop import run_loop

    if args.limit < 1:
        raise UserError(f"--limit: got {args.limit}, expected at least 1")
    found = run_loop(score_answers(load_recipe(args.recipe, args.overrides), Path(args.file)))
    if args.json:
        for one in found:
            sys.stdout.write(json.dumps(_as_json(one)) + "\n")
    else:
        _show(found, args.limit)
    return 1 if any(one.reward is None for one in found) else 0


def _as_json(one: "ScoredLine") -> dict[str, Any]:
    told: dict[str, Any] = {"line": one.line, "domain": one.domain}
    if one.reward is None:
        return told | {"reward": None, "why": one.why}
    reward = one.reward
    told |= {"reward": reward.score, "parts": dict(reward.parts), "outcome": reward.outcome}
    return told | {"cpu_s": reward.cpu_s, "correct": reward.correct}


def histogram(scores: list[float]) -> list[tuple[str, int]]:
    """Return bins and how many scores each has; a bin for every score where there are few different ones."""
    values = sorted(set(scores))
    if len(values) <= _BINS:
        return [(f"{value:g}", scores.count(value)) for value in values]
    low, width = values[0], (values[-1] - values[0]) / _BINS
    counts = [0] * _BINS
    for score in scores:
        counts[min(_BINS - 1, int((score - low) / width))] += 1
    return [(f"{low + at * width:.3g} to {low + (at + 1) * width:.3g}", num) for at, num in enumerate(counts)]


def _show(found: "list[ScoredLine]", limit: int) -> None:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = Console(highlight=False, markup=False, emoji=False)
    table = Table("line", "reward", "outcome", "cpu s", "parts, or why there is none", "answer")
    for one in found[:limit]:
        reward = one.reward
        parts = "" if reward is None else ", ".join(f"{name} {value:g}" for name, value in reward.parts.items())
        cells = [
            str(one.line),
            "none" if reward is None else f"{reward.score:g}",
            "failed" if reward is None else reward.outcome,
            "" if reward is None or reward.cpu_s is None else f"{reward.cpu_s:.3f}",
            one.why or parts,
            one.answer[:60],
        ]
        table.add_row(*(Text(plain(cell)) for cell in cells))
    console.print(table)
    if len(found) > limit:
        console.print(f"{len(found) - limit:,} further answers; --limit shows more")
    scores = [one.reward.score for one in found if one.reward is not None]
    if scores:
        bins = histogram(scores)
        most, wide = max(num for _, num in bins), max(len(name) for name, _ in bins)
        for name, num in bins:
            console.print(f"{name:>{wide}}  {'█' * round(_BAR * num / most)} {num:,}")
        console.print(f"mean {sum(scores) / len(scores):.4g} of {len(scores):,} answers")
    if len(scores) < len(found):
        console.print(f"{len(found) - len(scores):,} answers have no reward")
