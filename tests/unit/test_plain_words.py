"""A stranger's words are one printable line wherever they come in, in every frame that has any."""

from typing import Any, get_args

import msgspec
import pytest

from polyrl.errors import Refused, one_line, plain
from polyrl.wire import frames
from polyrl.wire.control import DrainRequest, JoinRequest

HOSTILE = "a\nb\r\x1b[31mred\x1b]0;title\x07 \u202egnp.exe \u2066x\u2069 \u200b\ufeff\x9b2J \u2028end\x00"


def filled(kind: Any, words: str) -> list[Any]:
    """A frame as it is on the wire, with these words wherever there may be words."""
    info = msgspec.inspect.type_info(kind)
    assert isinstance(info, msgspec.inspect.StructType)
    return [*([] if info.tag is None else [info.tag]), *(value_of(one.type, words) for one in info.fields)]


def value_of(kind: msgspec.inspect.Type, words: str) -> Any:
    match kind:
        case msgspec.inspect.StrType():
            return words if kind.pattern is None else ""
        case msgspec.inspect.IntType():
            return 1
        case msgspec.inspect.FloatType():
            return 0.5
        case msgspec.inspect.BytesType():
            return b""
        case msgspec.inspect.BoolType():
            return False
        case msgspec.inspect.LiteralType():
            return kind.values[0]
        case msgspec.inspect.DictType():
            return {value_of(kind.key_type, words): value_of(kind.value_type, words)}
        case msgspec.inspect.VarTupleType():
            return [value_of(kind.item_type, words)]
        case msgspec.inspect.StructType():
            if kind.array_like:
                return filled(kind.cls, words)
            return {one.encode_name: value_of(one.type, words) for one in kind.fields if one.required}
    raise AssertionError(f"no value for {kind}")


def words_of(value: Any) -> list[str]:
    if isinstance(value, str):
        return [value]
    if isinstance(value, msgspec.Struct):
        return [word for field in value.__struct_fields__ for word in words_of(getattr(value, field))]
    if isinstance(value, dict):
        return [word for key, one in value.items() for word in (key, *words_of(one))]
    if isinstance(value, tuple | list):
        return [word for one in value for word in words_of(one)]
    return []


@pytest.mark.parametrize("kind", [*get_args(frames.FromWorker), *get_args(frames.FromTrainer)])
def test_every_frame_of_a_peer_has_printable_words(kind: Any):
    decode = frames.decode_from_worker if kind in get_args(frames.FromWorker) else frames.decode_from_trainer
    frame = decode(frames.encode(filled(kind, HOSTILE)))
    addresses = set(getattr(frame, "weight_addresses", ())) | set(getattr(frame, "addresses", ()))
    assert all(word.isprintable() for word in words_of(frame) if word not in addresses), frame


def test_words_are_shown_as_they_were_said_and_in_one_line():
    said = plain(HOSTILE)
    assert said.isprintable()
    assert "\\x1b[31mred" in said
    assert "\\u202e" in said
    assert plain("Größe: 5 €, 日本語") == "Größe: 5 €, 日本語"


def test_words_that_are_written_out_are_not_longer_than_words_may_be():
    frame = frames.decode_from_worker(frames.encode(frames.Goodbye("\u202e" * 2000)))
    assert isinstance(frame, frames.Goodbye)
    assert len(frame.reason) == 300


def test_what_others_raise_and_what_is_refused_is_printable_too():
    assert one_line(ValueError(HOSTILE)).isprintable()
    assert str(Refused("frame", HOSTILE)).isprintable()


@pytest.mark.parametrize(
    "character", ["\n", "\x1b", "\x85", "\u202e", "\u2066", "\u200b", "\u061c", "\ufeff", "\u2028"]
)
def test_names_of_engines_and_models_have_nothing_that_is_not_seen(character: str):
    for field in ("engine", "model", "name"):
        facts = {"name": "a", "protocol": 1, "engine": "e", "model": "m", "slots": 1}
        facts[field] = f"x{character}y"
        with pytest.raises(msgspec.ValidationError):
            msgspec.convert(facts, JoinRequest)
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert({"reason": f"x{character}"}, DrainRequest)
