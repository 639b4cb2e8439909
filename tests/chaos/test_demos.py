"""Both demos, as anybody types them: a model learns while processes are killed, and nothing is lost."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(600)]


@pytest.mark.parametrize(("name", "killed"), [("sums", ["worker-0"]), ("agent", ["host-0", "worker-0"])])
def test_a_demo_shows_a_model_that_learns_while_processes_are_killed(tmp_path: Path, name: str, killed: list[str]):
    command = [sys.executable, "-m", "polyrl", "demo", name, "--out", str(tmp_path / "demo")]
    ended = subprocess.run(command, capture_output=True, check=False, text=True, timeout=580)
    assert ended.returncode == 0, ended.stderr
    for process in killed:
        assert f"{process} is killed with SIGKILL" in ended.stdout
    assert "worker-late is started, and joins in mid-run" in ended.stdout
    assert "records gave the same commands, all laws held" in ended.stdout
    went = re.search(r"The mean reward went from (\S+) to (\S+) in 40 steps", ended.stdout)
    assert went is not None, ended.stdout[-2000:]
    assert float(went[2]) > float(went[1]) + 0.4
    assert (tmp_path / "demo" / "pictures" / "reward.png").stat().st_size > 1000
