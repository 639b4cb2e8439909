"""A scratch directory ends with its owner, also when the owner is killed."""

import signal
import subprocess
import sys
from pathlib import Path

from benchmarks.scratch import scratch

ROOT = Path(__file__).parents[2]
OWNER = """
import sys, time
from pathlib import Path
from benchmarks.scratch import scratch
with scratch(Path(sys.argv[1])) as folder:
    (folder / "weights").write_bytes(b"x")
    print(folder, flush=True)
    time.sleep(60)
"""


def test_a_directory_is_there_while_it_is_used_and_not_afterwards(tmp_path):
    with scratch(tmp_path) as folder:
        (folder / "deep").mkdir()
        (folder / "deep" / "file").write_text("x")
    assert list(tmp_path.iterdir()) == []


def test_what_a_killed_owner_left_is_removed_by_the_next_and_what_is_in_use_is_not(tmp_path):
    killed, living = (
        subprocess.Popen([sys.executable, "-c", OWNER, str(tmp_path)], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for _ in range(2)
    )
    try:
        assert killed.stdout is not None
        assert living.stdout is not None
        left, used = Path(killed.stdout.readline().strip()), Path(living.stdout.readline().strip())
        killed.send_signal(signal.SIGKILL)
        killed.wait()
        assert left.exists()
        (tmp_path / "not-ours").mkdir()
        with scratch(tmp_path) as folder:
            assert not left.exists()
            assert {one.name for one in tmp_path.iterdir()} == {used.name, folder.name, "not-ours"}
            assert (used / "weights").read_bytes() == b"x"
    finally:
        for process in (killed, living):
            process.kill()
            process.communicate()
