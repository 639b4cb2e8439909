"""The calls of an episode: which prompt each had, and which of the drawn tokens are its answer.

A prompt is kept as what it adds to an earlier call (wire/host_frames.py). The whole prompt of the newest call is kept
too: the next one mostly grows from it.

Rules kept here: a prompt is compared token by token; nothing else decides whether a call was made before.
"""

from collections.abc import Sequence

from polyrl.wire import columns
from polyrl.wire.columns import CELL_BYTES, TOKEN_IDS
from polyrl.wire.frames import CallPayload

_ID_BYTES = TOKEN_IDS.itemsize
OPEN = -1


class CallRecord:
    """One call. `end` is OPEN until it is answered whole."""

    __slots__ = (
        *("base", "end", "finish", "is_trained", "kept", "max_tokens", "prompt", "start", "stop", "stop_ids", "tokens"),
    )

    def __init__(
        self,
        base: int,
        kept: int,
        tokens: bytes,
        start: int,
        max_tokens: int,
        stop_ids: tuple[int, ...] = (),
        stop: tuple[str, ...] = (),
    ) -> None:
        self.base, self.kept, self.tokens, self.start = base, kept, tokens, start
        self.max_tokens, self.stop_ids, self.stop = max_tokens, stop_ids, stop
        self.end = OPEN
        self.finish = ""
        self.is_trained = True
        self.prompt: bytes | None = None
        """Packed ids of the whole prompt, if they are at hand."""

    @property
    def prompt_bytes(self) -> int:
        return self.kept * _ID_BYTES + len(self.tokens)

    def close(self, end: int, finish: str) -> None:
        self.end, self.finish = end, finish


def prompt_of(calls: Sequence[CallRecord], cells: bytes | bytearray, number: int) -> bytes:
    """Return the packed ids of a call's whole prompt."""
    return _prompt_up_to(calls, cells, number, calls[number].prompt_bytes)


def _prompt_up_to(calls: Sequence[CallRecord], cells: bytes | bytearray, number: int, num_bytes: int) -> bytes:
    """Return the first bytes of a prompt, gathered from its end to its beginning: each is copied once, however many
    calls it grew over."""
    pieces: list[bytes] = []
    while True:
        record = calls[number]
        if record.prompt is not None:
            pieces.append(record.prompt[:num_bytes])
            break
        kept = record.kept * _ID_BYTES
        if num_bytes > kept:
            pieces.append(record.tokens[: num_bytes - kept])
            num_bytes = kept
        if record.base < 0:
            break
        number = record.base
        given = calls[number].prompt_bytes
        if num_bytes > given:
            pieces.append(_drawn(calls[number], cells)[: num_bytes - given])
            num_bytes = given
    return b"".join(reversed(pieces))


def grown_prompt(calls: Sequence[CallRecord], cells: bytes | bytearray, base: int, kept: int, tokens: bytes) -> bytes:
    """Return the prompt that goes on from `base`. Raises ValueError where that call has fewer tokens than `kept`."""
    if base < 0:
        if kept:
            raise ValueError("tokens of no call are kept")
        return tokens
    seen = prompt_of(calls, cells, base) + _drawn(calls[base], cells)
    if kept * _ID_BYTES > len(seen):
        raise ValueError(f"{kept} tokens of call {base} are kept, which has {len(seen) // _ID_BYTES}")
    return seen[: kept * _ID_BYTES] + tokens


def remember_prompt(calls: Sequence[CallRecord], prompt: bytes) -> None:
    """Keep the whole prompt of the newest call, and no other."""
    for record in calls[-3:-1]:
        record.prompt = None
    calls[-1].prompt = prompt


def num_received(calls: Sequence[CallRecord], num_calls: int) -> int:
    """Return the drawn tokens of the first `num_calls` calls, as far as they are answered."""
    answered = [one.end for one in calls[:num_calls] if one.end != OPEN]
    return answered[-1] if answered else 0


def payload_of(calls: Sequence[CallRecord]) -> tuple[CallPayload, ...]:
    return tuple(
        CallPayload(one.base, one.kept, one.tokens, one.start, one.end, one.finish, one.is_trained)
        for one in calls
        if one.end != OPEN
    )


def _drawn(record: CallRecord, cells: bytes | bytearray) -> bytes:
    end = len(cells) if record.end == OPEN else record.end * CELL_BYTES
    return columns.tokens_of(bytes(cells[record.start * CELL_BYTES : end]))
