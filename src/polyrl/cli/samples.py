"""`polyrl samples`: what a run's model answered, and what each answer was worth."""

import argparse
import json
import sys
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyrl.errors import UserError, plain_lines

if TYPE_CHECKING:
    from rich.console import Console

    from polyrl.run.kept_samples import Kept, KeptSample, Texts

EXAMPLE = """\
examples:
  polyrl samples runs/first
  polyrl samples runs/first --step 12 --worst --limit 3
  polyrl samples runs/first --grep "I cannot" --json

RUN is the directory of a run, live, ended or killed. Without --step, the newest step that was trained is shown; --grep
looks through all that are kept, the newest first."""

_LIMIT = 8
_SHOWN_CHARACTERS = 1200


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    parser.add_argument("--step", type=int, metavar="N", help="answers of this step's round; of the open one too")
    order = parser.add_mutually_exclusive_group()
    order.add_argument("--worst", action="store_true", help="the lowest rewards first")
    order.add_argument("--best", action="store_true", help="the highest rewards first")
    parser.add_argument("--grep", metavar="TEXT", help="only those whose prompt or answer has this text")
    parser.add_argument("--limit", type=int, metavar="N", help=f"at most so many (default: {_LIMIT}; with --json, all)")
    parser.add_argument("--full", action="store_true", help="long texts to their end")
    parser.add_argument("--tokenizer", metavar="DIR", help="a model's directory, where the run has no recipe")
    parser.add_argument("--json", action="store_true", help="one line a sample, for machines")


def run(args: argparse.Namespace) -> int:
    from polyrl.run.kept_samples import Kept, text_decoder

    run_dir = Path(args.run)
    if not run_dir.is_dir():
        raise UserError(f"{run_dir}: there is no such directory; expected that of a run")
    if args.limit is not None and args.limit < 1:
        raise UserError(f"--limit: got {args.limit}, expected at least 1")
    kept, text_of = Kept(run_dir), text_decoder(run_dir, args.tokenizer)
    limit = args.limit if args.limit is not None else None if args.json else _LIMIT
    order = "best" if args.best else "worst" if args.worst else None
    found = list(islice(kept.choose(text_of, step=args.step, grep=args.grep, order=order), limit))
    if args.json:
        for sample in found:
            sys.stdout.write(json.dumps(_as_json(sample, text_of)) + "\n")  # ASCII alone: harmless anywhere
        return 0
    _show(found, text_of, kept, full=args.full)
    return 0


def _as_json(sample: "KeptSample", text_of: "Texts") -> dict[str, Any]:
    return {
        "step": sample.step,
        "sample": sample.name,
        "state": sample.state,
        "prompt": text_of(sample.prompt),
        "answer": text_of(sample.answer),
        "reward": sample.reward,
        "parts": sample.parts,
        "num_tokens": sample.num_drawn,
        "finish": sample.finish,
        "written_by": [
            {"version": one.version, "worker": one.worker, "engine": one.engine, "num_tokens": one.num_tokens}
            for one in sample.segments
        ],
        "sequences": [
            [{"drawn": span.drawn, "text": text_of(span.tokens)} for span in sequence] for sequence in sample.sequences
        ],
    }


# For people


def _show(found: "list[KeptSample]", text_of: "Texts", kept: "Kept", *, full: bool) -> None:
    from rich.console import Console

    console = Console(highlight=False, markup=False, emoji=False)
    for sample in found:
        _show_one(console, sample, text_of, full=full)
    steps = kept.trained_steps or kept.steps  # the journal, which may be large, is read for what is not trained yet
    first, last = steps[0], steps[-1]
    there = f"step {first} is" if first == last else f"steps {first} to {last} are"
    console.print(f"{len(found)} shown; {there} kept. --step, --worst, --best, --grep and --limit choose")


def _show_one(console: "Console", sample: "KeptSample", text_of: "Texts", *, full: bool) -> None:
    from rich.padding import Padding
    from rich.text import Text

    reward = "not scored yet" if sample.reward is None else f"reward {sample.reward:g}"
    parts = ", ".join(f"{name} {value:g}" for name, value in sample.parts.items())
    state = "" if sample.state == "trained" else ", rejected: its group teaches nothing"
    state = ", not trained yet" if sample.state == "open" else state
    head = f"step {sample.step}  {sample.name}  {reward}{f' ({parts})' if parts else ''}{state}"
    console.print(Text(visible(head), style="bold"))
    how = f"{sample.num_drawn:,} tokens, {sample.finish}; {_writers(sample)}"
    console.print(Text(visible(how), style="dim"))
    if sample.sequences:
        _show_episode(console, sample, text_of, full=full)
        return
    for title, text in (("prompt", text_of(sample.prompt)), ("answer", text_of(sample.answer))):
        console.print(Text(title, style="cyan"))
        console.print(Padding(Text(_cut(visible(text), full=full)), (0, 0, 0, 2)))
    console.print()


def _show_episode(console: "Console", sample: "KeptSample", text_of: "Texts", *, full: bool) -> None:
    """Show what was given and what the policy drew, a row each; of several training sequences, one after the other."""
    from rich.table import Table
    from rich.text import Text

    for number, spans in enumerate(sample.sequences):
        if len(sample.sequences) > 1:
            console.print(Text(f"training sequence {number + 1} of {len(sample.sequences)}", style="cyan"))
        table = Table.grid(padding=(0, 2))
        for span in spans:
            style, title = ("bold green", "  drawn") if span.drawn else ("cyan", "  given")
            text = _cut(visible(text_of(span.tokens)), full=full)
            table.add_row(Text(title, style=style), Text(text, style="green" if span.drawn else ""))
        console.print(table)
    console.print()


def _writers(sample: "KeptSample") -> str:
    by = [f"version {one.version} on {one.worker or one.engine or 'a worker'}" for one in sample.segments]
    return ", then ".join(dict.fromkeys(by)) or "by an unknown worker"


def _cut(text: str, *, full: bool) -> str:
    if full or len(text) <= _SHOWN_CHARACTERS:
        return text
    half = _SHOWN_CHARACTERS // 2
    left_out = len(text) - 2 * half
    return f"{text[:half]}\n... {left_out:,} characters are left out; --full shows them ...\n{text[-half:]}"


def visible(text: str) -> str:
    """Return a model's text in a form that is safe in a terminal: unprintable characters but newlines are escaped."""
    return plain_lines(text.replace("\t", "    "))
