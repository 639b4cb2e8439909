"""`python -m polyrl`: the command line, for where the script is not on the path."""

import sys

from polyrl.cli.main import main

sys.exit(main())
