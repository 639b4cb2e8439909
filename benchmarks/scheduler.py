"""The scheduler on this machine: the same as `polyrl bench scheduler [--json] [--quick]`, from a checkout."""

import sys

from polyrl.cli.main import main

if __name__ == "__main__":
    sys.exit(main(["bench", "scheduler", *sys.argv[1:]]))
