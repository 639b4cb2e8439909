"""`polyrl top` in a real terminal shows the run; bad input is one line."""

import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from tests.integration.live import manager_in_thread

from polyrl.cli.main import main


def test_a_run_is_shown_in_a_terminal_until_ctrl_c(tmp_path: Path):
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "torch.py").write_text(
        "raise ImportError('it takes seconds, and nothing is computed here')"
    )
    env = {**os.environ, "PYTHONPATH": f"{tmp_path / 'without'}:{os.environ.get('PYTHONPATH', '')}"}
    (tmp_path / "metrics.jsonl").write_text('{"step":0,"reward/mean":0.25}\n{"step":1,"reward/mean":0.5}\n')
    with manager_in_thread(tmp_path):
        ours, theirs = pty.openpty()
        words = [sys.executable, "-m", "polyrl", "top", str(tmp_path)]
        process = subprocess.Popen(words, stdin=theirs, stdout=theirs, stderr=theirs, env=env, start_new_session=True)
        os.close(theirs)
        raw, shown, until = b"", "", time.monotonic() + 30.0
        while "to open a run" not in shown and time.monotonic() < until:
            if select.select([ours], [], [], 0.5)[0]:
                raw += os.read(ours, 65536)
                shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", raw.decode(errors="replace"))
        process.send_signal(signal.SIGINT)
        assert process.wait(20) == 130
        os.close(ours)
    assert "step    0  reward   0.25" in shown and "step    1  reward    0.5" in shown
    assert "Traceback" not in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "expected RUN, the directory of a live run, or --manager URL"),
        (["nowhere"], "standard output is no terminal; expected one, or use polyrl status"),
    ],
)
def test_what_cannot_be_watched_is_one_line(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]):
    assert main(["top", *arguments]) == 2
    assert capsys.readouterr().err == f"polyrl: error: {message}\n"
