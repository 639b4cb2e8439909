"""Triton's interpreter, quicker: its language is patched once a launch, not for every function that a kernel calls.

Import it after TRITON_INTERPRET is set. Where a newer Triton has no such functions, nothing is changed.
"""

# pyright: reportPrivateUsage=false
from typing import Any

import triton.runtime.interpreter as interpreter

_run = interpreter.InterpretedFunction.run
_patch: Any = getattr(interpreter, "_patch_builtin", None)
_patched: set[int] = set()
"""Packages that were patched in the launch that runs. Kernels are launched one after the other."""


def _patch_once(package: Any, builder: Any, *scope: Any) -> None:
    if id(package) not in _patched:
        _patched.add(id(package))
        _patch(package, builder, *scope)


def _launch(self: Any, *args: Any, **kwargs: Any) -> Any:
    _patched.clear()
    return _run(self, *args, **kwargs)


if _patch is not None:
    interpreter._patch_builtin = _patch_once
    interpreter.InterpretedFunction.run = _launch
