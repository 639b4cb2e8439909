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
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    parser.add_argument("out", metavar="DIR", help="a new directory")
    parser.add_argument(
        "--adapter", action="store_true", help="of a run with LoRA: its changes alone, as peft has them"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=int, help="of which checkpoint (default: the newest)")
    which.add_argument("--best", action="store_true", help="the checkpoint that checkpoint.keep_best has kept")


def run(args: argparse.Namespace) -> int:
    from polyrl.engines import registry
    from polyrl.errors import UserError

    registry.check_libraries()
    run_dir, out = Path(args.run), Path(args.out)
    if out.exists():
        raise UserError(f"{out}: is there already, expected a new directory")
    from polyrl.run import checkpoints
    from polyrl.trainer import exporting
    from polyrl.trainer.state import checkpoint, redo

    recipe, _ = checkpoints.read_recipe(run_dir, [])
    folder = exporting.choose(run_dir, _best(run_dir, recipe.model.path) if args.best else args.step)
    exporting.export(folder, recipe, out, adapter=args.adapter)
    what = "the adapter" if args.adapter else "the weights"
    print(f"{out}: {what} of {folder.name}, in {'float32' if args.adapter else recipe.model.dtype}")
    num_later = redo.num_after(run_dir, checkpoint.step_of(folder))
    if num_later and not args.best and args.step is None:
        go_on = f"polyrl train --resume {shlex.quote(str(run_dir))}"
        print(f"{num_later} later steps are only in the log; `{go_on}` trains them again")
    return 0


def _best(run_dir: Path, began_with: str) -> int:
    from polyrl.errors import UserError
    from polyrl.trainer.state import checkpoint

    best = checkpoint.read_best(run_dir)
    if best is None:
        raise UserError(
            f"--best: {run_dir} has kept none; expected a run with checkpoint.keep_best, after its first validation"
        )
    if best.step == 0:
        raise UserError(
            f"--best: no step of {run_dir} has validated better than what it began with ({best.metric}: "
            f"{best.value:.3g}): that is {began_with}, as it is"
        )
    return best.step
