#!/bin/sh
# The SGLang server for the CPU, into a virtual environment of its own: `polyrl worker --engine sglang --engine-python
# FOLDER/bin/python` and `make test-engines` start it. Takes a few minutes and 2.5 GB. Does nothing when it is there.
# SGLang ships for GPUs. What it imports there and a CPU lacks is put in its place here; nothing of it runs:
# sgl_kernel (no build for the CPU is published; without AMX it is never called) and the names of two torchvision operators.
set -eu
here=$(dirname "$0")
. "$here/engine_environment.sh"
folder=${1:-$HOME/.cache/polyrl/engines/sglang}
version=$(pinned SGLANG)
is_installed "$folder" sglang "$version" && exit 0

make_environment "$folder"
install --no-deps "sglang==$version"
# What is for GPUs only, or asks for another torch. The last line brings back, without their own needs, those it imports.
install_needed sglang torch torchvision torchaudio torchcodec cuda-python flash-attn-4 flashinfer_python humming-kernels \
    nvidia-cutlass-dsl nvidia-mathdx nvshmem4py-cu13 quack-kernels sgl-deep-ep sgl-deep-gemm sgl-flash-mla sglang-kernel \
    tilelang timm kernels apache-tvm-ffi torch_memory_saver outlines py-spy
install --no-deps kernels==0.14.1 torch_memory_saver==0.0.10 timm==1.0.25 outlines==0.1.11 apache-tvm-ffi==0.1.11 torchvision==0.28.0
mkdir -p "$packages/sgl_kernel"
cat > "$packages/sgl_kernel/__init__.py" <<'PYTHON'
"""In the place of the GPU kernels: can be imported, not called."""

__version__ = "0.4.10"


def __getattr__(name):
    if name.startswith("__"):
        raise AttributeError(name)

    def kernel(*_arguments, **_named):
        raise NotImplementedError(f"sgl_kernel.{name} needs a GPU or AMX")

    return kernel
PYTHON
cat > "$packages/torchvision_operators.py" <<'PYTHON'
"""Names two operators just before torchvision is imported: its library for GPUs cannot be loaded, and its import asks for them."""

import importlib.abc
import sys


class _Namer(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            torch._torchvision_operators = library = torch.library.Library("torchvision", "DEF")
            for operator in ("nms", "qnms"):
                library.define(operator + "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
        return None


sys.meta_path.insert(0, _Namer())
PYTHON
echo "import torchvision_operators" > "$packages/torchvision_operators.pth"
mark_installed "$folder" sglang "$version"
