"""A real model learns: SmolLM2-135M-Instruct on sums as one writes them, several seeds, and the page that shows it.

    make bench NAME=smollm2 ARGS='run MODEL_DIR OUT.json [section.key=value ...]'     on a GPU: minutes a seed
    make bench NAME=smollm2 ARGS='page OUT.json docs/results/smollm2.md'              draws the curve beside it

Rules kept here: every figure of the page comes from the runs' metrics, every text from the models: the one it started
from and the ones it became, asked the same validation problems, the likeliest token each time.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from polyrl.bench.machine import commit
from polyrl.config.recipe import Recipe
from polyrl.config.recipe_files import load_recipe
from polyrl.data.arithmetic import draw_problem
from polyrl.errors import UserError
from polyrl.telemetry.metrics import read_metrics

RECIPE = "smollm2-arithmetic"
SEEDS = (0, 1, 2)
ACCURACY = "validation/pass@1"
_NUM_SHOWN = 6
_MOST_TOKENS = 64


def run(model: str, out: Path, overrides: Sequence[str]) -> None:
    """Writes what it has as soon as it has it: whoever is cut off keeps that."""
    said: dict[str, Any] = {
        "recipe": RECIPE,
        "overrides": list(overrides),
        "commit": commit(),
        "device": _device(),
        "runs": [],
        "before": _answers(model, load_recipe(RECIPE, [*overrides, f"model.path={model}"])),
    }
    with tempfile.TemporaryDirectory() as folder:
        for seed in SEEDS:
            run_dir = Path(folder) / f"seed-{seed}"
            settings = [*overrides, f"model.path={model}", f"train.seed={seed}", "manager.port=0"]
            began = time.monotonic()
            _polyrl("train", RECIPE, *settings, "--run-dir", str(run_dir), "--quiet")
            seconds = time.monotonic() - began
            _polyrl("ledger", str(run_dir), "--verify")
            exported = str(Path(folder) / f"model-{seed}")
            _polyrl("export", str(run_dir), exported)
            lines = list(read_metrics(run_dir / "metrics.jsonl"))
            one: dict[str, Any] = {"seed": seed, "seconds": seconds, "lines": lines}
            said["runs"].append(one)
            out.write_text(json.dumps(said) + "\n", encoding="utf-8")
            one["after"] = _answers(exported, load_recipe(RECIPE, settings))
            out.write_text(json.dumps(said) + "\n", encoding="utf-8")
            rates = [line[ACCURACY] for line in lines if ACCURACY in line]
            print(f"seed {seed}: {seconds:.0f} s, {ACCURACY} {rates[0]:.3f} -> {rates[-1]:.3f}", flush=True)


def _polyrl(*words: str) -> str:
    ended = subprocess.run([sys.executable, "-m", "polyrl", *words], stdout=subprocess.PIPE, text=True, check=True)
    return ended.stdout


def _answers(model: str, recipe: Recipe) -> list[dict[str, str]]:
    domain = recipe.data.all_domains[0]
    answers: list[dict[str, str]] = []
    for index in range(_NUM_SHOWN):
        problem = draw_problem(domain.arithmetic, 0, "validation", index)
        prompt = domain.template.format(prompt=problem.as_written)
        said = json.loads(
            _polyrl("generate", "--model", model, "--prompt", prompt, "--tokens", str(_MOST_TOKENS), "--json")
        )
        answers.append({"prompt": prompt, "answer": said["text"], "expected": problem.answer})
    return answers


def _device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else f"CPU, {os.cpu_count()} cores"


def page(said: dict[str, Any], out: Path) -> None:
    curves = [[(line["step"], line[ACCURACY]) for line in one["lines"] if ACCURACY in line] for one in said["runs"]]
    picture = out.with_suffix(".png")
    _draw(said, curves, picture)
    words = " ".join(["python -m benchmarks smollm2 run MODEL_DIR OUT.json", *said["overrides"]])
    lines = [
        "# A real model learns",
        "",
        f"    python examples/smollm2.py models/smollm2\n    {words}",
        "",
        f"SmolLM2-135M-Instruct (from its PyPI wheel), recipe `{said['recipe']}`, commit {said['commit']}, "
        f"{said['device']}. Accuracy is pass@1 on validation problems, which training never sees.",
        "",
        f"![accuracy and reward over steps]({picture.name})",
        "",
        "| seed | accuracy at the start | at the end | best | mean reward, first and last five steps | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for one, curve in zip(said["runs"], curves, strict=True):
        rates = [rate for _, rate in curve]
        rewards = [line["reward/mean"] for line in one["lines"] if "reward/mean" in line]
        lines.append(
            f"| {one['seed']} | {rates[0]:.1%} | {rates[-1]:.1%} | {max(rates):.1%} | "
            f"{fmean(rewards[:5]):.2f} to {fmean(rewards[-5:]):.2f} | {one['seconds']:.0f} |"
        )
    lines += ["", "## The same problems, before and after", ""]
    last = said["runs"][0]["after"]
    for before, after in zip(said["before"], last, strict=True):
        lines += [
            f"- {before['prompt']}  (expected {before['expected']})",
            f"  - before: {_show(before['answer'])}",
            f"  - after (seed {said['runs'][0]['seed']}): {_show(after['answer'])}",
        ]
    out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _show(text: str) -> str:
    return f"`{' '.join(text.replace('`', chr(39)).split()) or '(nothing)'}`"


def _draw(said: dict[str, Any], curves: list[list[tuple[int, float]]], out: Path) -> None:
    import matplotlib.pyplot as plt

    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for one, curve in zip(said["runs"], curves, strict=True):
        left.plot(*zip(*curve, strict=True), marker="o", markersize=3, label=f"seed {one['seed']}")
        rewards = [(line["step"], line["reward/mean"]) for line in one["lines"] if "reward/mean" in line]
        right.plot(*zip(*rewards, strict=True), linewidth=1, label=f"seed {one['seed']}")
    left.set(title="validation accuracy (pass@1)", xlabel="step", ylim=(0, 1))
    right.set(title="mean reward in training", xlabel="step", ylim=(0, 1))
    left.legend()
    figure.savefig(out, dpi=110)


def main(argv: Sequence[str]) -> int:
    match list(argv):
        case ["run", model, out, *overrides]:
            run(model, Path(out), overrides)
        case ["page", source, out]:
            page(json.loads(Path(source).read_text(encoding="utf-8")), Path(out))
        case _:
            raise UserError("expected: run MODEL_DIR OUT.json [section.key=value ...], or: page OUT.json PAGE.md")
    return 0
