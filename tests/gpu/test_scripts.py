"""Every script of this folder runs to its end with a tiny model on the CPU, so that none falls behind the code.

What only a GPU can show (speed, bfloat16's kernels, memory) stays with a GPU; kernels run in Triton's interpreter.
"""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from polyrl.reproduce import measured
from polyrl.reproduce.names import REPRODUCTIONS

FOLDER = Path(__file__).parent
COMMANDS = {
    "check_algorithms": ["--device cpu --stride 97"],
    "check_code": ["--small"],
    "check_delta": ["--small"],
    "check_engine": [
        "right llama --small",
        "speed --small",
        "stream --small",
        "table --small",
        "profile eager --small",
        "profile chunk --small",
        "tune --small",
    ],
    "check_install": ["--small", "device --small"],
    "check_moves": ["--small"],
    "check_offload": ["bits --small", "memory --small"],
    "check_ranks": ["--small"],
    "check_resume": ["--small"],
    "check_run": ["--small"],
    "check_speculation": ["right --small", "speed --small", "round --small", "table --small"],
    "check_train": [
        "right --small",
        "speed eager --small",
        "variants --small",
        "profile eager --small",
        "long --small",
    ],
}
"""`check_engine.py peer` is left out: transformers' continuous batching takes two minutes on a CPU."""
NEEDS_TRITON = ("profile", "tune")


def test_every_file_is_a_script_with_a_small_command_or_what_they_share():
    assert {path.stem for path in FOLDER.rglob("*.py")} == {*COMMANDS, "setting", Path(__file__).stem}


@pytest.mark.gpu_scripts
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("script", "words"), [(script, words) for script, modes in COMMANDS.items() for words in modes]
)
def test_a_gpu_script_runs_small_on_the_cpu(script, words, tmp_path):
    if script == "check_engine" and words.startswith(NEEDS_TRITON) and importlib.util.find_spec("triton") is None:
        pytest.skip("Triton comes with a torch for GPUs, or by `pip install triton`")
    if script == "check_code" and shutil.which("bwrap") is None:
        pytest.skip("bwrap is missing: apt-get install bubblewrap")
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)}
    command = [sys.executable, str(FOLDER / f"{script}.py"), *words.split()]
    ran = subprocess.run(
        command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=580, check=False
    )
    assert ran.returncode == 0, ran.stdout[-2000:] + ran.stderr[-4000:]


@pytest.mark.gpu_scripts
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [name for name, one in REPRODUCTIONS.items() if not isinstance(one.gpu, str)])
def test_what_a_gpu_is_to_reproduce_becomes_a_section(name, monkeypatch):
    monkeypatch.chdir(FOLDER.parents[1])
    on_gpu = REPRODUCTIONS[name].gpu
    assert not isinstance(on_gpu, str)
    runs = measured.run(on_gpu.modes, print, ("--small", "--steps", "1"))
    section = on_gpu.section(runs)
    assert [row[0] for row in section.tables[0].rows] == list(on_gpu.modes)
    assert section.checks
    assert all(check.ours > 0 for check in section.checks)
