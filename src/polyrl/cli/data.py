"""`polyrl data ACTION ...`: make what a run starts from. An action finds what it is about in `args.what`."""

import argparse

from polyrl.cli.actions import Action, Actions, add_action, add_options, run_action

ACTIONS: Actions = {
    "prepare": Action("openr1|gsm8k|FILE", "write a data set as JSON lines", "polyrl.cli.data_prepare"),
    "model": Action(
        "arithmetic|smollm2", "make a model to start from: a small one, or a real one", "polyrl.cli.data_model"
    ),
}

EXAMPLES = """\
  polyrl data model arithmetic --out models/arithmetic
  polyrl data prepare gsm8k --source gsm8k/train.jsonl --out data/gsm8k.jsonl
  polyrl data prepare questions.parquet --out data/questions.jsonl"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_action(parser, ACTIONS, EXAMPLES)
    parser.add_argument("what", metavar="WHAT", help="what the action says")
    parser.add_argument("--out", required=True, metavar="PATH", help="where to write it")
    add_options(parser, ACTIONS)


def run(args: argparse.Namespace) -> int:
    return run_action(args, ACTIONS)
