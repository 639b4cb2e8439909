"""The example of the fleet guide: what the page shows is the file, and the file generates through real processes."""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "generate.py"
GUIDE = ROOT / "docs" / "guides" / "fleet.md"
PATIENCE_S = 50.0
"""With each of the processes, of which three start at once: a busy machine takes its time."""
ANSWERS_A_STEP = 32


@contextmanager
def process(folder: Path, *argv: str) -> Iterator[subprocess.Popen[str]]:
    """Killed at the end, if it has not ended."""
    with (folder / "log").open("a") as log:
        started = subprocess.Popen(
            [sys.executable, *argv], cwd=folder, stdout=subprocess.PIPE, stderr=log, text=True, encoding="utf-8"
        )
    try:
        yield started
    finally:
        started.kill()
        started.communicate(timeout=PATIENCE_S)


@pytest.fixture
def run_dir(tmp_path):
    """The directory of a manager that has a worker."""
    with process(tmp_path, "-m", "polyrl", "manager", "--run-dir", "run", "--port", "0") as manager:
        assert manager.stdout is not None
        url = manager.stdout.readline().split()[1]
        flags = ["--join", url, "--token-file", "run/worker.token", "--name", "a", "slots=32", "speedup=40"]
        with process(tmp_path, "-m", "polyrl", "worker", *flags):
            yield tmp_path / "run"


def test_the_guide_shows_the_example_as_it_is():
    (shown,) = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown == EXAMPLE.read_text(encoding="utf-8")


def test_the_example_has_at_most_40_lines():
    assert len(EXAMPLE.read_text(encoding="utf-8").splitlines()) <= 40


def test_the_example_generates_every_answer_once(run_dir):
    with process(run_dir.parent, str(EXAMPLE), str(run_dir), "2") as trainer:
        printed, _ = trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == 0, (run_dir.parent / "log").read_text()
    answers = Counter(line.partition(",")[0] for line in printed.splitlines())
    assert len(answers) == 2 * ANSWERS_A_STEP
    assert set(answers.values()) == {1}


def test_an_example_that_was_killed_goes_on_with_the_groups_that_it_had_not_taken(run_dir):
    with process(run_dir.parent, str(EXAMPLE), str(run_dir), "1") as trainer:
        assert trainer.stdout is not None
        first = [trainer.stdout.readline().rstrip() for _ in range(8)]  # two groups; one of them is taken by now
        trainer.kill()
        first += trainer.communicate(timeout=PATIENCE_S)[0].splitlines()
    with process(run_dir.parent, str(EXAMPLE), str(run_dir), "2") as trainer:
        printed, _ = trainer.communicate(timeout=PATIENCE_S)
    assert trainer.returncode == 0, (run_dir.parent / "log").read_text()
    again = printed.splitlines()
    assert len({*first, *again}) == 2 * ANSWERS_A_STEP
    assert not {*first[:4]} & {*again}
    assert len(again) == len({*again})
