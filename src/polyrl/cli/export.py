"""`polyrl export`: a run's newest weights as a Hugging Face directory."""

import argparse
import shlex
from pathlib import Path

EXAMPLE = """\
example:
  polyrl export runs/arithmetic models/trained
  polyrl export runs/arithmetic-lora models/adapter --adapter
  polyrl generate --model models/trained --prompt 'a3b5c4='

Writes the newest checkpoint (or the one of --step, or the --best) in the dtype that the run serves, with the tokenizer,
so that transformers and the engines load it. Steps after it are in the redo log: `polyrl train --resume` makes them a
checkpoint. Of a run with LoRA, base and changes are merged; with --adapter, the
changes alone are written, for peft.PeftModel.from_pretrained."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    parser.add_argument("out", metavar="DIR", help="a new directory")
    parser.add_argument(
        "--adapter", action="store_true", help="of a run with LoRA: its changes alone, as peft has them"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="of which checkpoint (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint that checkpoint.keep_best has kept")


def run(args: argparse.Namespace) -> int:
    from polyrl.run import api
    from polyrl.trainer.state import checkpoint, redo

    run_dir = Path(args.run)
    exported = api.export(run_dir, args.out, step=args.step, best=args.best, adapter=args.adapter)
    what, folder = "the adapter" if args.adapter else "the weights", exported.checkpoint
    print(f"{exported.folder}: {what} of {folder.name}, in {exported.dtype}")
    num_later = redo.num_after(run_dir, checkpoint.step_of(folder))
    if num_later and not args.best and args.step is None:
        go_on = f"polyrl train --resume {shlex.quote(str(run_dir))}"
        print(f"{num_later} later steps are only in the log; `{go_on}` trains them again")
    return 0
