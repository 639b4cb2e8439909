"""Make the small model that a recipe here starts from: it knows the format of an answer, and plays badly.

    python examples/environments/make_model.py frozen-lake --python .venv-environments

`--python` is the environment that has the package; lessons are recorded there. The model has about 100,000 parameters
and a tokenizer of the words of its environment.
"""

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from teachers import END, START, TASKS, TaughtTask
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from polyrl.starters import teaching
from polyrl.starters.teaching import Demonstration

HERE = Path(__file__).parent
PAD, UNKNOWN = "<pad>", "<unknown>"
MARKS = (PAD, END, UNKNOWN, START)
"""Special tokens, in the order of their ids; teaching.py wants the first two to be the padding and the end."""

Spans = list[tuple[bool, str]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("task", choices=sorted(TASKS))
    parser.add_argument("--python", type=Path, default=Path(sys.prefix), help="the environment with the package")
    parser.add_argument("--out", type=Path, default=None, help="default: models/TASK")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    out = args.out or Path("models") / args.task
    if out.exists():
        parser.error(f"{out} is there already")
    make(args.task, args.python, out, seed=args.seed)
    print(f"{out}: a model for the task {args.task}")


def make(
    name: str, python: Path, out: Path, *, seed: int = 0, num_episodes: int | None = None, num_steps: int | None = None
) -> None:
    task = TASKS[name]
    episodes = lessons(name, python, num_episodes or task.num_episodes)
    tokenizer = words_as_tokens(task, episodes)
    shown = [demonstration(tokenizer, spans) for spans in episodes]

    def demonstrate(number: int, _: float, __: random.Random) -> Demonstration:
        return shown[number % len(shown)]

    def save_tokenizer(folder: Path) -> None:
        tokenizer.save(str(folder / "tokenizer.json"))
        special = {"pad_token": PAD, "eos_token": END, "unk_token": UNKNOWN}
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False, **special}
        (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1), encoding="utf-8")
        if task.template is not None:
            (folder / "chat_template.jinja").write_text(task.template, encoding="utf-8")

    teaching.make_model(
        out,
        demonstrate,
        seed=seed,
        num_steps=num_steps or task.num_steps,
        save_tokenizer=save_tokenizer,
        num_words=tokenizer.get_vocab_size(),
    )


def lessons(name: str, python: Path, num_episodes: int) -> list[Spans]:
    """Have them recorded with the package's own Python."""
    found = [str(HERE), *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "lessons.jsonl"
        argv = [
            str(python / "bin" / "python"),
            str(HERE / "record.py"),
            name,
            str(file),
            "--episodes",
            str(num_episodes),
        ]
        subprocess.run(argv, check=True, env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, found))})
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def words_as_tokens(task: TaughtTask, episodes: list[Spans]) -> Tokenizer:
    split = pre_tokenizers.Split(Regex(task.words), "isolated")
    words = set(task.always)
    for text in {text for spans in episodes for _, text in spans}:
        for part in text.replace(START, END).split(END):
            words |= {word for word, _ in split.pre_tokenize_str(part)}
    vocabulary = {word: number for number, word in enumerate((*MARKS, *sorted(words - set(MARKS))))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    tokenizer.add_special_tokens([AddedToken(mark, special=True, normalized=False) for mark in MARKS])
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.Fuse()
    return tokenizer


def demonstration(tokenizer: Tokenizer, spans: Spans) -> Demonstration:
    tokens: list[int] = []
    drawn: list[bool] = []
    for is_drawn, text in spans:
        piece = tokenizer.encode(text).ids + ([MARKS.index(END)] if is_drawn else [])
        tokens += piece
        drawn += [is_drawn] * len(piece)
    return Demonstration(tokens, drawn)


if __name__ == "__main__":
    main()
