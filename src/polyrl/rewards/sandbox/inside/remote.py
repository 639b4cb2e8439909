"""The tests' side of a pytest run: the module `solution`, of which every use is asked of the program's process.

Rules kept here: plain data of the program arrives as plain data, so that no class of its own decides what equals what.
An object of the program equals itself; it is compared with another one by the program, and with plain data by its
contents, as those of a named tuple, or is unequal. Arithmetic with plain data gives an object of the program or an
error, and `in` looks through the items here. Otherwise an answer could return an object that claims to equal
everything, or whose difference from everything is 0.
Left out: functions of the tests as arguments. Arguments are plain data or the program's own objects.
"""

import builtins
import socket
import sys
import types
from typing import Any

from polyrl.rewards.sandbox.inside import frames, values
from polyrl.rewards.sandbox.inside.answering import MAX_BYTES

_KEPT = "_polyrl_remote"


class Client:
    """Sends requests, one at a time, and makes values or exceptions of the replies."""

    def __init__(self, line: socket.socket) -> None:
        self._line = line
        self._exceptions: dict[int, type[Exception]] = {}

    def request(self, target: int, op: str, *args: Any, **kwargs: Any) -> Any:
        request = {"target": target, "op": op, "args": self._encode(list(args)), "kwargs": self._encode(kwargs)}
        self._line.sendall(frames.pack(request, []))
        _, (body,) = frames.read(self._line.recv, MAX_BYTES)
        said = values.from_bytes(body)
        sys.stdout.write(str(said["printed"]))
        if "value" not in said:
            raise self._raised(said)
        value = self._decode(said["value"])
        if op == "call" and value is None:
            for own, theirs in zip(args, self._decode(said["args"]), strict=True):
                _change(own, theirs)
        return value

    def _decode(self, said: Any) -> Any:
        return values.decode(said, other=self._make)

    def _raised(self, said: Any) -> Exception:
        """Return the exception that the program raised, with its arguments. Those of Python check them, so that a
        program that lies about them raises something else."""
        kind = self._exception(said["raised"])
        try:
            error = kind(*self._decode(said["args"]))
        except Exception:  # noqa: BLE001  its constructor may raise anything
            error = kind(str(said["text"]))
        if number_of(kind) is not None:
            error.__dict__[_KEPT] = RemoteObject(self, int(said["number"]), kind.__name__), str(said["text"])
        return error

    def _encode(self, value: Any) -> Any:
        def refer(one: Any) -> int:
            number = number_of(one)
            if number is None:
                raise TypeError(f"a {type(one).__name__} cannot be passed to the program: expected plain data")
            return number

        return values.encode(value, other=refer)

    def _make(self, said: Any) -> Any:
        if isinstance(said, str):
            return values.Other(said)
        if "exception" in said:
            return self._exception(said["exception"])
        return RemoteObject(self, int(said["number"]), str(said["name"]))

    def _exception(self, lineage: list[Any]) -> type[Exception]:
        """Return a class of the same name, that derives from the same exception of Python."""
        number, name = int(lineage[0][0]), str(lineage[0][1])
        if number not in self._exceptions:
            self._exceptions[number] = self._make_exception(number, name, lineage[1:])
        return self._exceptions[number]

    def _make_exception(self, number: int, name: str, above: list[Any]) -> type[Exception]:
        own = getattr(builtins, name, None)
        if isinstance(own, type) and issubclass(own, Exception):
            return own
        own_parts = {_KEPT: number, "__str__": _text_of, "__getattr__": _attribute_of}
        return type(name, (self._exception(above),), own_parts) if above else Exception


def _text_of(error: Exception) -> str:
    return error.__dict__[_KEPT][1] if _KEPT in error.__dict__ else Exception.__str__(error)


def _attribute_of(error: Exception, name: str) -> Any:
    if name.startswith("__") or _KEPT not in error.__dict__:
        raise AttributeError(name)
    return getattr(error.__dict__[_KEPT][0], name)


def _change(own: Any, theirs: Any) -> None:
    """Have a list, dict or set of the tests hold what a function that returned nothing has made of it. Were it done
    for others too, a result could be made right by clearing what it is compared with."""
    match own:
        case list() if type(theirs) is list:
            own[:] = theirs
        case dict() | set() if type(theirs) is type(own):
            own.clear()
            own.update(theirs)
        case _:
            pass


class RemoteObject:
    """An object that is in the program's process."""

    def __init__(self, client: Client, number: int, name: str) -> None:
        object.__setattr__(self, _KEPT, (client, number, name))

    def __getattr__(self, name: str) -> Any:
        return _request(self, "get", name)

    def __setattr__(self, name: str, value: Any) -> None:
        _request(self, "set", name, value)

    def __delattr__(self, name: str) -> None:
        _request(self, "delete", name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _request(self, "call", *args, **kwargs)

    def __next__(self) -> Any:
        return _request(self, "next")[0]

    def __instancecheck__(self, value: Any) -> bool:
        return number_of(value) is not None and _request(self, "is_instance", value) is True

    def __eq__(self, other: object) -> bool:
        if self is other or number_of(other) is not None:
            return self is other or _request(self, "eq", other) is True
        contents = _request(self, "contents")
        return type(contents) is list and len(contents) == 1 and contents[0] == other

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return int(_request(self, "hash"))

    def __contains__(self, value: Any) -> bool:
        return any(one is value or one == value for one in _request(self, "iter"))

    def __bool__(self) -> bool:
        return _request(self, "bool") is True

    def __exit__(self, *ignored: object) -> None:
        _request(self, "exit")


def number_of(value: Any) -> int | None:
    """Return the number of a program's object or exception class; None for anything else."""
    if type(value) is RemoteObject:
        return object.__getattribute__(value, _KEPT)[1]
    return value.__dict__.get(_KEPT) if isinstance(value, type) else None


def install(line: socket.socket) -> None:
    """Make `import solution` mean the program."""
    client = Client(line)
    module = types.ModuleType(values.PROGRAM)

    def find(name: str) -> Any:
        if name == "__all__":  # asked by `import *`, which shall replace neither `abs` nor what the tests imported
            taken = {*vars(builtins), *sys._getframe(1).f_globals}
            return [one for one in client.request(0, "names") if one.isidentifier() and one not in taken]
        if name.startswith("__"):
            raise AttributeError(name)
        return client.request(0, "get", name)

    module.__getattr__ = find  # type: ignore[method-assign]
    sys.modules[values.PROGRAM] = module


def _request(target: RemoteObject, op: str, *args: Any, **kwargs: Any) -> Any:
    client, number, _ = object.__getattribute__(target, _KEPT)
    return client.request(number, op, *args, **kwargs)


def _forward(op: str) -> Any:
    def method(self: RemoteObject, *args: Any) -> Any:
        return _request(self, op, *args)

    return method


def _compute(op: str) -> Any:
    """Return a method whose result is an object of the program, unless all operands are."""

    def method(self: RemoteObject, *args: Any) -> Any:
        found = _request(self, op, *args)
        if number_of(found) is None and not (args and all(number_of(one) is not None for one in args)):
            return NotImplemented
        return found

    return method


def _order(op: str) -> Any:
    def method(self: RemoteObject, other: Any) -> Any:
        return NotImplemented if number_of(other) is None else _request(self, op, other) is True

    return method


for _name in ("len", "iter", "str", "repr", "int", "float", "enter"):
    setattr(RemoteObject, f"__{_name}__", _forward(_name))
for _name, _op in (("getitem", "item"), ("setitem", "set_item"), ("delitem", "delete_item")):
    setattr(RemoteObject, f"__{_name}__", _forward(_op))
for _name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "matmul", "and", "or", "xor"):
    setattr(RemoteObject, f"__{_name}__", _compute(_name))
    setattr(RemoteObject, f"__r{_name}__", _compute(f"r{_name}"))
for _name in ("abs", "neg"):
    setattr(RemoteObject, f"__{_name}__", _compute(_name))
for _name in ("lt", "le", "gt", "ge"):
    setattr(RemoteObject, f"__{_name}__", _order(_name))
