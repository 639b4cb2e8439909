"""The `polyrl` command, and `python -m polyrl`.

A command that has returned has closed what it opened. What is left of the interpreter's end, taking torch apart object
by object, takes seconds, during which somebody who pressed Ctrl+C watches nothing happen: it is left out.
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
