"""The versions of servers are named in one place; scripts and the page follow it."""

import subprocess
from pathlib import Path

import pytest

from polyrl.engines.served import versions

ROOT = Path(__file__).parents[2]
PINNED = {name: version for name, version in vars(versions).items() if name.isupper()}


@pytest.mark.parametrize("name", PINNED)
def test_install_scripts_read_the_pinned_versions(name: str):
    script = f'here=benchmarks; . benchmarks/engine_environment.sh; pinned "{name}"'
    said = subprocess.run(["sh", "-euc", script], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert said.strip() == PINNED[name]


def test_the_page_names_them():
    page = (ROOT / "docs/guides/engine-versions.md").read_text(encoding="utf-8")
    assert f"| vLLM | {versions.VLLM} |" in page
    assert f"| SGLang | {versions.SGLANG} |" in page
    assert f"| torch, for both | {versions.TORCH} |" in page


def test_nobody_else_names_them():
    for script in ("install_vllm_cpu.sh", "install_sglang_cpu.sh", "engine_environment.sh"):
        text = (ROOT / "benchmarks" / script).read_text(encoding="utf-8")
        assert not [version for version in PINNED.values() if version in text]
