"""The program's side of a pytest run: it does what the tests ask of the module, one request after the other.

Plain data travels as a copy; everything else stays here and travels as a number. The arguments of a function that
returns nothing travel back, since it may work in place. Nothing here is trusted: this process runs the program, which
may change all of it. It can only answer wrongly, as a wrong program does.
"""

import io
import operator
import socket
import sys
from collections.abc import Callable
from typing import Any

from polyrl.rewards.sandbox.inside import frames, values

MAX_BYTES = 16 << 20


class Held:
    """The objects that the tests have numbers of."""

    def __init__(self) -> None:
        self._objects: list[Any] = []
        self._numbers: dict[int, int] = {}

    def number(self, value: Any) -> int:
        known = self._numbers.get(id(value))
        if known is None:
            known = self._numbers[id(value)] = len(self._objects)
            self._objects.append(value)  # kept for ever, so that no other object gets its id
        return known

    def describe(self, value: Any) -> dict[str, Any]:
        said: dict[str, Any] = {"number": self.number(value), "name": type(value).__name__}
        if isinstance(value, type) and issubclass(value, BaseException):
            said["exception"] = self.lineage(value)
        return said

    def lineage(self, kind: type) -> list[Any]:
        return [[self.number(one), one.__name__] for one in kind.__mro__]

    def find(self, said: Any) -> Any:
        return self._objects[int(said)]


def serve(line: socket.socket, module: Any) -> None:
    """Answer until the tests hang up. The module is object 0."""
    held, printed = Held(), io.StringIO()
    held.number(module)
    sys.stdout = printed  # a test may look at what a call has printed
    while True:
        try:
            request, _ = frames.read(line.recv, MAX_BYTES)
        except EOFError:
            return
        try:
            args = values.decode(request["args"], other=held.find)
            found = _do(held, request, args)
            said = {"value": values.encode(found, other=held.describe)}
            if request["op"] == "call" and found is None:
                said["args"] = values.encode(args, other=held.describe)
        except Exception as error:  # noqa: BLE001  the tests may expect it
            said = {"raised": held.lineage(type(error)), "text": str(error)[:2000], "number": held.number(error)}
            said["args"] = values.encode(list(error.args), other=held.describe)
        said["printed"] = printed.getvalue()
        printed.seek(0)
        printed.truncate()
        line.sendall(frames.pack({}, [values.to_bytes(said)]))


def _do(held: Held, request: dict[str, Any], args: list[Any]) -> Any:
    target = held.find(request["target"])
    match request["op"]:
        case "call":
            return target(*args, **values.decode(request["kwargs"], other=held.find))
        case "get":
            return getattr(target, args[0])
        case "set":
            return setattr(target, *args)
        case "names":
            return [one for one in dir(target) if not one.startswith("_")]
        case "is_instance":
            return isinstance(args[0], target)
        case "next":
            return [next(target)]
        case "contents":
            return [plain(target) for plain in values.PLAIN if isinstance(target, plain)][:1]
        case _:
            return _OPERATORS[request["op"]](target, *args)


_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow, "matmul": operator.matmul,
    "and": operator.and_, "or": operator.or_, "xor": operator.xor,
}  # fmt: skip
_OPERATORS: dict[str, Callable[..., Any]] = {
    **_ARITHMETIC,
    **{f"r{name}": lambda one, other, do=do: do(other, one) for name, do in _ARITHMETIC.items()},
    "item": operator.getitem, "set_item": operator.setitem, "delete_item": operator.delitem, "delete": delattr,
    "len": len, "iter": iter,
    "str": str, "repr": repr, "bool": bool, "abs": abs, "neg": operator.neg,
    "int": int, "float": float, "hash": hash,
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge,
    "enter": lambda one: one.__enter__(), "exit": lambda one: one.__exit__(None, None, None),
}  # fmt: skip
