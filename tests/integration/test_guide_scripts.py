"""Guides that are one session in a shell, played from their first command to their last, as they stand.

Changed are the port, which may be taken; `make setup`, which is done; and sleeps, which wait three times as long as a
reader does, since tests share their machine.
"""

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

GUIDES = Path(__file__).parents[2] / "docs" / "guides"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
TYPED = re.compile(r"(make|polyrl|export|curl|kill|python|sleep|wait) ")
BEGIN = """
trap 'kill $(jobs -p) 2>/dev/null; builtin wait' EXIT
sleep() { command sleep $((3 * $1)); }
"""


def script(page: str, port: int) -> str:
    """Return a page's session: what it shows as typed, and its Python after the commands above it."""
    parts = [BEGIN]
    for kind, text in BLOCK.findall((GUIDES / page).read_text(encoding="utf-8")):
        if kind == "python":
            parts.append(f"python - <<'END'\n{text}END\n")
        elif not kind and TYPED.match(text):
            parts.append(re.sub(r"^make setup.*$", "", text, flags=re.MULTILINE))
    return "".join(parts).replace("5000", str(port)).replace("polyrl manager ", f"polyrl manager --port {port} ")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


@pytest.mark.chaos
@pytest.mark.timeout(900)
def test_the_guide_for_openais_clients_does_what_it_shows(tmp_path: Path):
    ended = subprocess.run(
        ["bash", "-c", script("serve.md", free_port())],
        cwd=tmp_path, env={**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"},
        capture_output=True, text=True, timeout=800, check=False,
    )  # fmt: skip
    logs = {path.name: path.read_text() for path in tmp_path.glob("*.log")}
    assert ended.returncode == 0 and "Traceback" not in ended.stderr + str(logs), (ended.stdout, ended.stderr, logs)
    assert '"text":"b5=8c4=12d2=14"' in ended.stdout, "what curl gets"
    assert ended.stdout.rstrip().endswith("b5=8"), "what OpenAI's client gets"
    assert "b5=8c4=12d2=14 stop 15\n" in ended.stdout
