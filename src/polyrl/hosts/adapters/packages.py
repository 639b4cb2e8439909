"""Packages that an adapter needs: imported when asked for, and one line where they are missing."""

import importlib
from typing import Any

from polyrl.errors import UserError, one_line


def need(module: str, package: str) -> Any:
    """Return a module. Raises UserError, which names what to install."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        top = module.partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and error.name is not None and error.name.partition(".")[0] == top:
            raise UserError(f"this environment needs {top}: pip install '{package}'") from error
        raise UserError(f"{top} cannot be imported: {one_line(error)}") from error
