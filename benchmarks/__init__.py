"""Comparisons of PolyRL with other software, and learning runs. They run from a checkout: no wheel holds them.

A benchmark is a module with `main(argv) -> int`; `python -m benchmarks NAME ...` finds it (__main__.py).
"""

import json
from collections.abc import Sequence
from typing import Any

from polyrl.cli.parser import Parser


def parser_of(name: str, argv: Sequence[str], doc: str | None) -> Parser:
    """Options that every benchmark of a table and a JSON object has."""
    parser = Parser(argv, prog=f"make bench NAME={name}", description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the table")
    parser.add_argument("--quick", action="store_true", help="a small load, to try the benchmark out")
    return parser


def tell(result: dict[str, Any], lines: Sequence[str], *, as_json: bool) -> int:
    print(json.dumps(result, indent=2) if as_json else "\n".join(lines))
    return 0
