"""Jobs, their results and a run's reward settings as bytes, between the trainer and a reward worker.

Rules kept here: plain data, decoded by type, never pickle; functions travel by name, environment variables too. A
result is checked as if a stranger had made it: `read_result` raises BadResult for what no honest worker says.
Left out: how the bytes get there (wire/reward_frames.py), and which worker has which job (places.py).
"""

from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from polyrl.config.rewards import WeightedReward
from polyrl.errors import ConfigError, PolyrlError, one_line, plain, shorten
from polyrl.not_data import NOT_DATA
from polyrl.rewards.groups import make_group, take_apart
from polyrl.rewards.line import RewardCall, ScoredReply
from polyrl.rewards.messages import FunctionRequest, GroupScored, RewardScored, pack_plain, read_extension
from polyrl.rewards.reward import Reward, RewardFailed, RewardStops, RewardTimedOut, RewardUnavailable, check_value

_MAX_S = 1e9


class RewardTerms(Struct, frozen=True, kw_only=True):
    """The part of a recipe that a reward worker needs."""

    functions: dict[str, WeightedReward]
    """By the setting that names each."""
    wall_s: Annotated[float, Meta(gt=0, le=_MAX_S)]
    memory_bytes: Annotated[int, Meta(ge=0, le=1 << 60)]
    """The most memory of a process; 0: no limit."""
    environment: tuple[str, ...]
    """Variables of the reward worker's own that functions get although they look like secrets."""
    sandbox: bool = False
    """Run the processes in a sandbox of the reward worker's."""
    start_s: Annotated[float, Meta(gt=0, le=_MAX_S)] = 60.0
    """The time for a process to start and to make its functions ready."""


class _TravellingFailure(Struct, frozen=True, tag=True, array_like=True):
    reason: Annotated[str, Meta(max_length=2000)]
    kind: Literal["failed", "timed_out", "unavailable", "stops"]
    cpu_s: Annotated[float, Meta(ge=0, le=_MAX_S)] = 0.0


class BadResult(PolyrlError):
    """The bytes are no result that a reward worker of ours makes."""


_encoder = msgspec.msgpack.Encoder(enc_hook=str)
_decode_call = msgspec.msgpack.Decoder(FunctionRequest, ext_hook=read_extension).decode
_decode_terms = msgspec.msgpack.Decoder(RewardTerms).decode
_decode_result = msgspec.msgpack.Decoder(RewardScored | GroupScored | _TravellingFailure).decode


def pack_terms(terms: RewardTerms) -> bytes:
    return _encoder.encode(terms)


def read_terms(body: bytes) -> RewardTerms:
    """Decode settings. Raises ConfigError for those of another PolyRL version."""
    try:
        return _decode_terms(body)
    except NOT_DATA as error:
        raise ConfigError(f"the run's reward settings are not of this PolyRL: {error}") from error


def pack_call(call: RewardCall) -> bytes:
    """Encode a job. Raises RewardFailed for a row that is no plain data."""
    given, answers = take_apart(call.given)
    request = FunctionRequest(b"", "reward", call.function, call.arguments, given, call.timeout_s, answers=answers)
    try:
        return pack_plain(request, _encoder)
    except (TypeError, ValueError, OverflowError) as error:
        raise RewardFailed(f"the row is no plain data: {one_line(error)}") from error


def read_call(body: bytes) -> RewardCall:
    """Decode a job. Raises RewardFailed for one of another PolyRL version."""
    try:
        read = _decode_call(body)
    except NOT_DATA as error:
        raise RewardFailed(f"the job is not of this PolyRL: {one_line(error)}") from error
    if read.given is None or not 0 < read.timeout_s <= _MAX_S:
        raise RewardFailed("the job is not of this PolyRL: it has no answer, or no time limit")
    given = read.given if read.answers is None else make_group(read.given, read.answers)
    return RewardCall(read.function, read.arguments, given, read.timeout_s)


def pack_reply(reply: ScoredReply) -> bytes:
    return _encoder.encode(reply)


def pack_failure(error: PolyrlError) -> bytes:
    """Pack why there is no reward: RewardFailed, RewardTimedOut, RewardUnavailable, RewardStops or ConfigError."""
    reason = shorten(plain(str(error)))
    match error:
        case RewardTimedOut():
            return _encoder.encode(_TravellingFailure(reason, "timed_out", error.cpu_s))
        case RewardUnavailable():
            return _encoder.encode(_TravellingFailure(reason, "unavailable"))
        case RewardStops():
            return _encoder.encode(_TravellingFailure(reason, "stops"))
        case _:
            return _encoder.encode(_TravellingFailure(reason, "failed"))


def read_result(call: RewardCall, body: bytes) -> ScoredReply | RewardFailed | RewardUnavailable | RewardStops:
    """Return the reply with the reward, or the error that stands for none.

    Raises BadResult for what no honest worker says.
    """
    try:
        read = _decode_result(body)
    except NOT_DATA as error:
        raise BadResult(f"a result that is none: {one_line(error)}") from error
    if isinstance(read, _TravellingFailure):
        reason = shorten(plain(read.reason))
        if read.kind == "timed_out":
            return RewardTimedOut(reason, read.cpu_s)
        if read.kind == "stops":
            return RewardStops(reason)
        return RewardUnavailable(reason) if read.kind == "unavailable" else RewardFailed(reason)
    if not call.is_answered_by(read):
        raise BadResult("a result for other answers than it was given")
    for one in read.rewards if isinstance(read, GroupScored) else [read]:
        if one is not None:
            _check(one)
    return read


def _check(told: RewardScored) -> None:
    try:
        check_value(Reward(told.score, told.parts, told.outcome, told.cpu_s, told.correct))
    except (RewardFailed, RewardUnavailable) as error:
        raise BadResult(f"a reward that cannot be: {error}") from error
