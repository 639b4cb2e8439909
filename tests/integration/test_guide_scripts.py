"""The commands of the guides, typed one after the other into a shell, as the pages stand: see guide_sessions.py."""

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tests.integration.guide_sessions import SESSIONS, PlayedGuide, files, script

ROOT = Path(__file__).parents[2]
PATIENCE_S = 1200
MODELS = ("arithmetic", "calculator", "code")
"""Those that `polyrl data model` makes, in half a minute or more."""
BEGIN = """
trap 'trap - ERR; kill $(jobs -p) 2>/dev/null; builtin wait' EXIT
trap 'echo "ended with an error: $BASH_COMMAND" >&2' ERR
sleep() { command sleep $((3 * $1)); }
shows() { for _ in {1..100}; do polyrl status --run-dir $1 2>&1 | grep $2 && return; sleep 1; done; false; }
"""
MAY_FAIL = ("wait ", "kill ", "timeout ", "grep -c ")
"""What ends with the signal that something was stopped by, and a count that is 0 where a worker joined late."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models that a session has made, for those after it; the first, which most begin with, is there already."""
    folder = tmp_path_factory.mktemp("models")
    make = [sys.executable, "-m", "polyrl", "data", "model", "arithmetic", "--out", str(folder / "arithmetic")]
    subprocess.run(make, check=True, stdout=subprocess.DEVNULL)
    return folder


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def typed_into_a_shell(text: str, folder: Path) -> tuple[str, str]:
    """Return what was printed. All that was started ends with it, also where it takes too long."""
    shell = subprocess.Popen(
        ["bash", "-c", text],
        cwd=folder,
        env={**os.environ, "ROOT": str(ROOT), "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    try:
        return shell.communicate(timeout=PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(shell.pid, signal.SIGKILL)
        shell.wait()


@pytest.mark.chaos
@pytest.mark.timeout(PATIENCE_S + 60)
@pytest.mark.parametrize("session", SESSIONS, ids=lambda session: session.page)
def test_a_guide_does_what_it_shows(session: PlayedGuide, models: Path, tmp_path: Path):
    shutil.copytree(models, tmp_path / "models")
    for name, text in files(session).items():
        (tmp_path / name).write_text(text)
    typed, refused = script(session, free_port())
    stdout, stderr = typed_into_a_shell(BEGIN + typed, tmp_path)
    for name in MODELS:
        if (tmp_path / "models" / name).is_dir() and not (models / name).exists():
            shutil.copytree(tmp_path / "models" / name, models / name)
    logs = "".join(path.read_text(errors="replace") for path in sorted(tmp_path.glob("*.log")))
    failed = {line.partition(": ")[2] for line in stderr.splitlines() if line.startswith("ended with an error: ")}
    assert {one for one in failed if not one.startswith(MAY_FAIL)} == refused, stderr + logs
    assert "Traceback" not in stderr + logs, stderr + logs
    assert [one for one in session.prints if one not in stdout] == [], stdout + stderr
