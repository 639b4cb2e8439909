"""The `polyrl` command, and `python -m polyrl`.

A command closes what it opened before it returns. The rest of the interpreter's shutdown, in which torch is freed
object by object, takes seconds in which a user who pressed Ctrl+C sees nothing happen: it is skipped.
"""

import atexit
import logging
import os
import sys
from typing import NoReturn

from polyrl.cli.main import main


def run() -> NoReturn:
    code = main()
    atexit._run_exitfuncs()
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            code = code or 1
    os._exit(code)


if __name__ == "__main__":
    run()
