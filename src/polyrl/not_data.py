"""The exceptions of msgspec's decoders for bytes that are not what was expected: nested without end, too.

Apart from `errors`, which `polyrl --help` imports, and which needs the standard library alone.
"""

import msgspec

NOT_DATA = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
