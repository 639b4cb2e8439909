"""Commands that pages show, run as processes in one reader's folder; each must end with 0.

Runs are shortened by the words of `SHORT`, and a reader's own file (`mine.toml`) is one that ships. Every command that
is not run here is listed with its reason in `PARSED_ONLY`; tests/architecture/test_docs_commands.py holds those to the
real parser, recipe keys and scenarios included.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.architecture.test_docs_commands import OWN, SHOWN, Shown

import polyrl

SHORT = {
    "train": ("train.steps=2", "validation.every_steps=0", "validation.at_start=false", "manager.port=0"),
    "simulate": ("--steps=2",),
    "plan": ("--steps=2", "--workers=1-2", "--factors=1"),
}
"""What is added to a command that does not say it itself."""

PARSED_ONLY = {
    r"(worker|manager|up|down|drain|status)\b": "needs a fleet meanwhile: test_guide_scripts.py, tests/providers",
    r"(demo|dash)\b": "takes minutes, or ends with Ctrl+C: test_demo.py, test_guide_scripts.py, tests/web",
    r"(generate|data prepare)\b": "a model, or a data set, of the reader's: tests/builtin, tests/data",
    r"env\b": "a person, a package, or another model: tests/hosts, make test-environments",
    r"data model (code|calculator)": "minutes of a core: test_guide_scripts.py",
    r"train .*(--ranks|--nodes|engine=vllm|0\.0\.0\.0)": "several machines, devices or a server: tests/chaos",
    r"train .*(frozen-lake|smollm2)|train (code|calculator|agent\.toml)": "other models, packages: tests/environments",
    r"train mine\.toml lora": "as arithmetic-lora, with other layers: tests/trainer",
    r"(samples|doctor|ledger) runs/agent": "of a run with a model that is left out: test_guide_scripts.py",
    r"simulate (.*supply\.trace|same\.toml)": "a trace, and a file, of the reader's own: test_guide_scripts.py",
    r"(simulate|plan) agent-tools|plan mine\.toml": "minutes of simulations, shortened: test_guide_scripts.py",
}
MAKERS = ("data", "train", "simulate", "plan")
"""Commands that make what the others look at."""


def reason(shown: Shown) -> str:
    """Return why a command is only parsed; empty: it is run."""
    text = " ".join(shown.words)
    return next((why for pattern, why in PARSED_ONLY.items() if re.match(pattern, text)), "")


def once(commands: list[Shown]) -> list[list[str]]:
    """Return the commands to run, each once, those that make something first."""
    found = {tuple(one.words): list(one.words) for one in commands if not reason(one)}
    return sorted(found.values(), key=lambda words: ([*MAKERS, words[0]].index(words[0]), "--resume" in words))


RUN = once(SHOWN)


def shortened(words: list[str]) -> list[str]:
    if "--list" in words:
        return words
    keys = {word.partition("=")[0] for word in words}
    more = ("train.steps=3",) if "--resume" in words else SHORT.get(words[0], ())  # a step that is not trained yet
    return [*words, *(one for one in more if one.partition("=")[0] not in keys)]


def prepare(words: list[str], desk: Path) -> None:
    """Put what a page had its reader write before the command into the folder."""
    ours = Path(polyrl.__file__).parent
    shipped = ours / ("sim/scenarios/elastic-8b" if words[0] in ("simulate", "plan") else "recipes/arithmetic")
    for word in words[1:]:
        if OWN.search(word):
            text = shipped.with_suffix(".toml").read_text(encoding="utf-8")
            (desk / word).write_text(text.replace('name = "arithmetic"', f'name = "{Path(word).stem}"'))
        elif word in ("run", "runs/synchronous", "runs/streaming") and not (desk / word).exists():
            shutil.copytree(desk / "runs" / "first", desk / word)
    if words[0] == "train" and "--resume" not in words and "--run-dir" not in words:
        shutil.rmtree(desk / "runs" / Path(words[1]).stem, ignore_errors=True)  # of the page before


@pytest.mark.chaos
@pytest.mark.timeout(2400)
def test_commands_of_pages_do_what_they_say(tmp_path: Path):
    shutil.copytree(Path(__file__).parents[2] / "examples", tmp_path / "examples")
    failed: list[str] = []
    for words in RUN:
        prepare(words, tmp_path)
        ended = subprocess.run(
            [sys.executable, "-m", "polyrl", *shortened(words)],
            cwd=tmp_path, env={**os.environ, "COLUMNS": "80"}, capture_output=True, text=True, timeout=600, check=False,
        )  # fmt: skip
        said = ended.stdout + ended.stderr
        print(ended.returncode, " ".join(words), f"{len(said)} characters", flush=True)
        if ended.returncode != 0 or "Traceback" in said or not said.strip():
            failed.append(f"{' '.join(words)}: {ended.returncode}\n{said[-1500:]}")
    assert failed == [], "\n\n".join(failed)


def test_a_command_that_is_only_parsed_has_a_reason_and_every_reason_a_command():
    parsed = [" ".join(one.words) for one in SHOWN if reason(one)]
    assert [pattern for pattern in PARSED_ONLY if not any(re.match(pattern, one) for one in parsed)] == []
    run = {words[0] for words in RUN}
    assert run >= {
        "data",
        "train",
        "simulate",
        "plan",
        "samples",
        "doctor",
        "replay",
        "story",
        "ledger",
        "plot",
        "export",
    }
    assert len(RUN) > 30
