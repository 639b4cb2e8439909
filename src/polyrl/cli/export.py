"""`polyrl export`: a run's newest weights as a Hugging Face directory."""

import argparse
from pathlib import Path

EXAMPLE = """\
example:
  polyrl export runs/arithmetic models/trained
  polyrl generate --model models/trained --prompt 'a3b5c4='

Writes the newest checkpoint (or the one of --step) in the dtype that the run serves, with the tokenizer, so that
transformers and the engines load it."""

_COPIED = ("tokenizer", "special_tokens", "vocab", "merges", "added_tokens", "chat_template", "generation_config")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = EXAMPLE
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("run", metavar="RUN", help="the directory of a run")
    parser.add_argument("out", metavar="DIR", help="a new directory")
    parser.add_argument("--step", type=int, help="of which checkpoint (default: the newest)")


def run(args: argparse.Namespace) -> int:
    from polyrl.cli import builtin
    from polyrl.errors import UserError

    builtin.check_libraries()
    run_dir, out = Path(args.run), Path(args.out)
    if out.exists():
        raise UserError(f"{out}: is there already, expected a new directory")
    from polyrl.cli.training import checkpoints
    from polyrl.trainer import exporting

    recipe = checkpoints.read_recipe(run_dir, [])
    folder = exporting.choose(run_dir, args.step)
    exporting.export(folder, recipe, out)
    for path in sorted(Path(recipe.model.path).iterdir()):
        if path.is_file() and path.name.startswith(_COPIED) and not (out / path.name).exists():
            (out / path.name).write_bytes(path.read_bytes())
    print(f"{out}: the weights of {folder.name}, in {recipe.model.dtype}")
    return 0
