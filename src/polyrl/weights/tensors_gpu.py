"""Deltas made on the device: it compares, gathers and counts, and the host only compresses.

The encoder keeps the previous version's serving weights on the device. A new state is cast, compared with them and
stored in their place, one slab at a time. Only gaps and differences leave the device, as bytes: about a hundredth of
the weights. Host threads compress one slab while the device works on the next.

Rules kept here: the delta equals that of `delta.encode`, byte for byte, so it does not matter where it was made. A
piece with many or wide changes is copied to the host and encoded there. The code is plain torch and runs on any device.
On a GPU it has a stream of its own: the host often waits for counts, and would otherwise wait for all other work there.
"""

from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import Tensor

from polyrl.weights.delta import (
    ESCAPE,
    PART_ELEMENTS,
    Encoded,
    Piece,
    assemble,
    encode_piece,
    is_surely_sparse,
    pack_sparse,
    pieces_of,
)
from polyrl.weights.manifest import Encoding, Layout
from polyrl.weights.tensors import TORCH_DTYPES, source_of

SLAB_ELEMENTS = 1 << 28
"""The elements compared at once: enough to fill a device, few compared with a model."""

_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
Written: TypeAlias = tuple[Encoding, bytes] | None


class _Slab(NamedTuple):
    """Neighbouring pieces whose elements have the same size."""

    pieces: list[Piece]

    @property
    def start(self) -> int:
        return self.pieces[0].start

    @property
    def num_bytes(self) -> int:
        last = self.pieces[-1]
        return last.start + last.num_elements * last.item_bytes - self.start


class _Changes(NamedTuple):
    """The changes in a slab, on the host. The changes of piece k are those from bounds[k] to bounds[k + 1]."""

    bounds: list[int]
    gap_bounds: list[int]
    wide_bounds: list[int]
    gaps: np.ndarray[Any, Any]
    codes: np.ndarray[Any, Any]
    wide: np.ndarray[Any, Any]


class GpuDeltaEncoder:
    """Keeps the newest version's weights on the device, and returns what each new state changes."""

    def __init__(
        self,
        layout: Layout,
        state: Mapping[str, Tensor],
        *,
        threads: int = 8,
        part_elements: int = PART_ELEMENTS,
        slab_elements: int = SLAB_ELEMENTS,
    ) -> None:
        self._layout, self._threads = layout, threads
        self._slabs = list(_slabs_of(layout, part_elements, slab_elements))
        device = next(iter(state.values())).device
        self._stream = torch.cuda.Stream(device, priority=-1) if device.type == "cuda" else None
        self._held = torch.zeros(layout.num_bytes, dtype=torch.uint8, device=device)
        largest = max((slab.num_bytes for slab in self._slabs), default=0)
        self._fresh = torch.zeros(largest, dtype=torch.uint8, device=device)
        for slab in self._slabs:
            self._fill(slab, state, self._held_bytes(slab))

    def encode(self, state: Mapping[str, Tensor]) -> Encoded:
        """Return the delta from the held version to this state, which is then the held one."""
        if self._stream is None:
            return self._encode(state)
        self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
        try:
            with torch.cuda.stream(self._stream):
                return self._encode(state)
        finally:
            self._stream.synchronize()  # the memory it writes to may be reused afterwards

    def _encode(self, state: Mapping[str, Tensor]) -> Encoded:
        waiting: list[Future[Written] | Written] = []
        with ThreadPoolExecutor(self._threads, thread_name_prefix="delta") as pool:
            for slab in self._slabs:
                held, fresh = self._held_bytes(slab), self._fresh[: slab.num_bytes]
                fresh.zero_()
                self._fill(slab, state, fresh)
                kind = _INTEGERS[slab.pieces[0].item_bytes]
                changes = _find_changes(slab, held.view(kind), fresh.view(kind))
                waiting.extend(_write(pool, slab, changes, held, fresh))
                held.copy_(fresh)
            written = [one.result() if isinstance(one, Future) else one for one in waiting]
        pieces = [piece for slab in self._slabs for piece in slab.pieces]
        return assemble(pieces, written)

    def _held_bytes(self, slab: _Slab) -> Tensor:
        return self._held[slab.start : slab.start + slab.num_bytes]

    def _fill(self, slab: _Slab, state: Mapping[str, Tensor], out: Tensor) -> None:
        """Write the state's tensors to their places in the slab, in the layout's dtype."""
        for tensor, pieces in _by_tensor(slab):
            entry = self._layout.tensors[tensor]
            first, last = pieces[0], pieces[-1]
            stop = last.first + last.num_elements
            value = source_of(entry, state).reshape(-1)[first.first : stop]
            start = first.start - slab.start
            target = out[start : start + value.numel() * entry.item_bytes].view(TORCH_DTYPES[entry.dtype])
            target.copy_(value)


def _write(
    pool: ThreadPoolExecutor, slab: _Slab, changes: _Changes | None, held: Tensor, fresh: Tensor
) -> Iterator[Future[Written] | Written]:
    for index, piece in enumerate(slab.pieces):
        if changes is None or changes.bounds[index] == changes.bounds[index + 1]:
            yield None
            continue
        parts = (
            changes.gaps[changes.gap_bounds[index] : changes.gap_bounds[index + 1]],
            changes.codes[changes.bounds[index] : changes.bounds[index + 1]],
            changes.wide[changes.wide_bounds[index] : changes.wide_bounds[index + 1]],
        )
        num_bytes = piece.num_elements * piece.item_bytes
        roomy = sum(part.nbytes for part in parts) + 64 < num_bytes
        if roomy and is_surely_sparse(piece.num_elements, len(parts[1]), len(parts[2])):
            yield pool.submit(_write_sparse, *parts)
            continue
        start = piece.start - slab.start
        both = [_bits(one[start : start + num_bytes], piece.item_bytes) for one in (held, fresh)]
        yield pool.submit(encode_piece, *both)


def _write_sparse(gaps: np.ndarray[Any, Any], codes: np.ndarray[Any, Any], wide: np.ndarray[Any, Any]) -> Written:
    return "sparse", pack_sparse(gaps, codes, wide)


def _slabs_of(layout: Layout, part_elements: int, slab_elements: int) -> Iterator[_Slab]:
    pieces: list[Piece] = []
    num_elements = 0
    for piece in pieces_of(layout, part_elements):
        is_full = num_elements + piece.num_elements > slab_elements
        if pieces and (is_full or piece.item_bytes != pieces[0].item_bytes):
            yield _Slab(pieces)
            pieces, num_elements = [], 0
        pieces.append(piece)
        num_elements += piece.num_elements
    if pieces:
        yield _Slab(pieces)


def _by_tensor(slab: _Slab) -> Iterator[tuple[int, list[Piece]]]:
    grouped: dict[int, list[Piece]] = {}
    for piece in slab.pieces:
        grouped.setdefault(piece.tensor, []).append(piece)
    yield from grouped.items()


def _find_changes(slab: _Slab, old: Tensor, new: Tensor) -> _Changes | None:
    """Compare two slabs, given as integers; None if they are equal.

    Both are zero between pieces, so every change belongs to a piece.
    """
    positions = torch.nonzero(old != new).view(-1)
    if not len(positions):
        return None
    item_bytes = slab.pieces[0].item_bytes
    starts = torch.tensor([(piece.start - slab.start) // item_bytes for piece in slab.pieces], device=old.device)
    bounds = torch.searchsorted(positions, starts)
    gaps = torch.empty_like(positions)
    gaps[1:] = positions[1:] - positions[:-1] - 1
    inside = bounds < len(positions)  # pieces that have a change at or after their start
    firsts = bounds[inside]
    gaps[firsts] = positions[firsts] - _latest_start(positions[firsts], starts)
    codes, wide_mask, wide = _differences(old[positions], new[positions])
    escapes = gaps // ESCAPE
    ends = torch.cumsum(escapes + 1, 0)
    gap_bytes = torch.full((int(ends[-1]),), ESCAPE, dtype=torch.uint8, device=old.device)
    gap_bytes[ends - 1] = (gaps - escapes * ESCAPE).to(torch.uint8)
    zero = ends.new_zeros(1)
    gap_bounds = torch.cat([zero, ends])[bounds]
    wide_bounds = torch.cat([zero, torch.cumsum(wide_mask, 0)])[bounds]
    table = torch.stack([bounds, gap_bounds, wide_bounds])
    host = [_to_host(one) for one in (table, gap_bytes, codes, wide)]
    if old.device.type == "cuda":
        torch.cuda.current_stream(old.device).synchronize()
    counts = (len(positions), len(gap_bytes), len(wide))
    rows = [[*row, count] for row, count in zip(host[0].tolist(), counts, strict=True)]
    unsigned = host[3].numpy().view(f"u{item_bytes}")
    return _Changes(rows[0], rows[1], rows[2], host[1].numpy(), host[2].numpy(), unsigned)


def _latest_start(positions: Tensor, starts: Tensor) -> Tensor:
    return starts[torch.searchsorted(starts, positions, right=True) - 1]


def _differences(old: Tensor, new: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return the zigzag differences as bytes, which of them are wide, and the wide ones in full."""
    difference = new - old
    bits = 8 * difference.element_size()
    zigzag = (difference << 1) ^ (difference >> (bits - 1))
    is_wide = (zigzag < 0) | (zigzag >= ESCAPE) if bits > 8 else zigzag == -1
    codes = torch.where(is_wide, ESCAPE, zigzag.to(torch.uint8) if bits > 8 else zigzag.view(torch.uint8))
    return codes.to(torch.uint8), is_wide, zigzag[is_wide]


def _to_host(tensor: Tensor) -> Tensor:
    if tensor.device.type != "cuda":
        return tensor.contiguous()
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return pinned.copy_(tensor, non_blocking=True)


def _bits(tensor: Tensor, item_bytes: int) -> np.ndarray[Any, Any]:
    """Return the bits as a host copy, because the device's memory is overwritten while the piece is encoded."""
    return tensor.to("cpu", copy=True).numpy().view(f"<u{item_bytes}")
