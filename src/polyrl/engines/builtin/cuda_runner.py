"""Runs steps on one NVIDIA GPU: prefill as it comes, decoding from CUDA graphs, several steps at a time.

A graph holds a whole decoding step: the model, the draw, and the step to the next position; so replaying it again needs
nothing from the host. A *burst* replays it several times; meanwhile the host takes a *look* at what the first steps
brought, and the GPU does not wait for it. Graphs are made by batch size, rounded up; the rows that are too many write
into a block that nobody reads.

A burst can be interrupted: few replays are ahead of the GPU, so that it ends a step or two later.

Batch-invariant, every matrix product has one shape, whoever runs, and a row is added up in one order: all decoding
steps have as many rows as there are slots; prompts are computed one at a time, in chunks that begin at fixed places
(batching.py) and are made up to one size (cuda_layout.py). What was decoded and is prefilled again, after a move or
because the cache was full, comes from other kernels: it is not the same to the last bit.

The decoder layers are compiled one for all (`compile`), or run as they are: slower, and ready at once.
"""

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from polyrl.engines.builtin import cuda, packed, sampling
from polyrl.engines.builtin.batching import Chunk
from polyrl.engines.builtin.cuda import DecodeStep, PrefillStep
from polyrl.engines.builtin.cuda_layout import lay_out
from polyrl.engines.builtin.cuda_memory import BlockedKeysAndValues
from polyrl.engines.builtin.merging import merge_projections
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.builtin.offloading import Offloading
from polyrl.engines.builtin.steps import MAX_BURST, Drawn, Look, Wanted

log = logging.getLogger("polyrl.engines.builtin")

_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024)

_AHEAD = 2
"""Replays that the GPU has waiting: enough that it never waits for the host."""
_LOOK_STEPS = 8
"""Steps of a burst that are looked at together, while the next ones run."""
_FUSED = {"combo_kernels": True, "combo_kernel_foreach_dynamic_shapes": True}
"""What is done to queries and what is done to keys becomes one kernel: 1.5% of a step's time."""

Tensor = torch.Tensor


class _Graph(NamedTuple):
    graph: torch.cuda.CUDAGraph
    size: int


class CudaRunner:
    shows_bursts = True

    def __init__(
        self,
        loaded: Loaded,
        num_blocks: int,
        block_tokens: int,
        slots: int,
        max_context: int,
        *,
        compile_layers: bool,
        invariant_tokens: int = 0,
        offload: bool = False,
    ) -> None:
        """`invariant_tokens`: a prompt's chunks have so many rows, and results are batch-invariant; 0: neither."""
        self._loaded = loaded
        self._num_blocks, self._block_tokens = num_blocks, block_tokens
        self._parameter = next(loaded.model.parameters())
        self._device = self._parameter.device
        torch.cuda.set_device(self._device)  # of the thread that runs steps: kernels, graphs and the cache go there
        packed.find_flash()
        self._num_processors = cuda.num_processors()
        self._any_mask = torch.zeros((1, 1, 1, 1), dtype=self._parameter.dtype, device=self._device)
        heads, dim = loaded.num_kv_heads, loaded.head_dim
        self._paged = BlockedKeysAndValues(
            loaded.num_layers, num_blocks, heads, block_tokens, dim, self._parameter.dtype
        )
        self._is_awake = False
        self._graphs: dict[int, _Graph] = {}
        self._graph_memory = torch.cuda.graph_pool_handle()
        """Of all graphs: only one of them runs at a time."""
        self._invariant_tokens = invariant_tokens
        self._sizes = [slots] if invariant_tokens else [*(one for one in _SIZES if one < slots), slots]
        self._interrupted = threading.Event()
        width = -(-(max_context + MAX_BURST) // block_tokens)  # a burst goes on when an answer is over
        rows = slots + 1  # never all of them: what is compiled for a part of a tensor is not for the whole
        self._tables = torch.full((rows, width), num_blocks, dtype=torch.int32, device=self._device)
        self._tokens, self._positions, self._answers, self._seeds = (
            torch.zeros(rows, dtype=torch.int64, device=self._device) for _ in range(4)
        )
        self._temperatures = torch.ones(rows, dtype=torch.float32, device=self._device)
        self._drawn = torch.zeros((MAX_BURST, slots), dtype=torch.int64, device=self._device)
        self._logprobs = torch.zeros((MAX_BURST, slots), dtype=torch.float32, device=self._device)
        self._cursor = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._done = [torch.cuda.Event() for _ in range(_AHEAD)]
        self._looking = torch.cuda.Stream()
        self._uniforms = cuda.uniforms
        merge_projections(loaded.model)
        self._offloading = Offloading(loaded.model) if offload else None
        self.wake()
        if compile_layers:
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            for layer in loaded.model.model.layers:
                layer.compile(dynamic=True, options=_FUSED)
            self._uniforms = torch.compile(cuda.uniforms, dynamic=True)

    def wake(self) -> None:
        if self._offloading is not None:
            self._offloading.bring_back()
        if not self._is_awake:
            self._paged.attach(self._loaded.model)
            self._is_awake = True

    def sleep(self) -> None:
        """Give back the cache's memory. Graphs stay, as they find it at the same place again, unless weights go too."""
        if self._is_awake:
            self._paged.detach(self._loaded.model)
            self._is_awake = False
        if self._offloading is not None:
            self._graphs.clear()
            self._offloading.take_away()
        torch.cuda.empty_cache()

    def close(self) -> None:
        """The model is whole afterwards: it may be another's."""
        self._graphs.clear()
        if self._offloading is not None:
            self._offloading.bring_back()
            self._offloading = None
        self.sleep()
        self._paged.close()

    def change_weights(self, write: Callable[[], None] | None) -> None:
        """Nothing is derived from them: graphs read them where they are."""
        if write is None:
            return
        if self._offloading is None or not self._offloading.is_away:
            write()
            return
        self._offloading.bring_back()
        try:
            write()
        finally:
            self._offloading.take_away()
            torch.cuda.empty_cache()

    # Prefill

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], wanted: Sequence[Wanted]) -> Drawn:
        """Any step. `wanted` has an entry for each chunk that samples, in order.

        Those that decode are a step from a graph, unless they are truncated: it reads their contexts where they are,
        and the other way copies them. Batch-invariant, every other chunk is a step by itself.
        """
        asked = dict(zip((number for number, chunk in enumerate(chunks) if chunk.samples), wanted, strict=True))
        graphed = [number for number, one in asked.items() if chunks[number].decodes and not one.sampling.truncates]
        others = sorted(set(range(len(chunks))) - set(graphed))
        drawn: dict[int, tuple[int, float]] = {}
        if graphed:
            one = self.run_burst([chunks[at] for at in graphed], [asked[at] for at in graphed], 1)[0]
            drawn.update(zip(graphed, zip(*one, strict=True), strict=True))
        at_once = 1 if self._invariant_tokens else len(chunks)
        for first in range(0, len(others), at_once):
            some = others[first : first + at_once]
            sampled = [at for at in some if at in asked]
            one = self._run_packed([chunks[at] for at in some], [asked[at] for at in sampled])
            drawn.update(zip(sampled, zip(*one, strict=True), strict=True))
        return Drawn([drawn[at][0] for at in asked], [drawn[at][1] for at in asked])

    def _run_packed(self, chunks: Sequence[Chunk], wanted: Sequence[Wanted]) -> Drawn:
        """Row by row, of whatever lengths."""
        step, tokens, positions, rows = self._lay_out(chunks)
        hidden = self._hidden(tokens, positions, step)
        logits = self._loaded.logits(hidden[0].index_select(0, rows))
        if not wanted:
            return Drawn([], [])
        draws = sampling.plan_draws(
            [one.sampling for one in wanted],
            [one.seed for one in wanted],
            [one.position for one in wanted],
            self._device,
        )
        if draws.truncated:
            drawn, logprobs = sampling.draw(logits, draws)
        else:
            drawn, logprobs = cuda.draw(logits, draws.temperatures, draws.uniforms)
        return Drawn(drawn.tolist(), logprobs.tolist())

    def _hidden(self, tokens: Tensor, positions: Tensor, step: DecodeStep | PrefillStep) -> Tensor:
        return self._loaded.model.model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=self._any_mask,
            use_cache=False,
            step=step,
        ).last_hidden_state

    def _lay_out(self, chunks: Sequence[Chunk]) -> tuple[PrefillStep, Tensor, Tensor, Tensor]:
        its = lay_out(chunks, self._block_tokens, self._num_blocks, self._invariant_tokens)
        step = PrefillStep(
            self._send(its.cells),
            self._send(its.blocks),
            self._send(its.within),
            self._send(its.first_rows),
            self._send(its.first_contexts),
            its.longest_rows,
            its.longest_context,
        )
        return step, self._send(its.tokens), self._send(its.positions), self._send(its.rows)

    def _send(self, numbers: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)

    # Decoding

    def interrupt(self) -> None:
        """End the burst that runs, if one does. From any thread, like `uninterrupt`."""
        self._interrupted.set()

    def uninterrupt(self) -> None:
        self._interrupted.clear()

    @torch.inference_mode()
    def run_burst(
        self, chunks: Sequence[Chunk], wanted: Sequence[Wanted], num_steps: int, look: Look | None = None
    ) -> list[Drawn]:
        """`num_steps` tokens of each sample, fewer if interrupted; all chunks decode, and none is truncated.

        With a `look` it gets the steps as they come, and the last ones are returned.
        """
        graph = self._graph(len(chunks))
        self._set_rows(chunks, wanted, graph.size)
        num_seen = 0
        for step in range(num_steps):
            if step >= _AHEAD:
                self._done[step % _AHEAD].synchronize()
                num_done = step - _AHEAD + 1
                if look is not None and num_done - num_seen == _LOOK_STEPS:
                    with torch.cuda.stream(self._looking):
                        look(self._read(num_seen, num_done, len(chunks)))
                    num_seen = num_done
                if self._interrupted.is_set():
                    num_steps = step
                    break
            graph.graph.replay()
            self._done[step % _AHEAD].record()
        return self._read(num_seen, num_steps, len(chunks))

    def _read(self, first: int, end: int, num: int) -> list[Drawn]:
        """What these steps of a burst drew."""
        tokens, logprobs = self._drawn[first:end, :num].tolist(), self._logprobs[first:end, :num].tolist()
        return [Drawn(*one) for one in zip(tokens, logprobs, strict=True)]

    def _set_rows(self, chunks: Sequence[Chunk], wanted: Sequence[Wanted], size: int) -> None:
        num = len(chunks)
        width = max(len(chunk.member.blocks) for chunk in chunks)
        tables = np.full((size, width), self._num_blocks, np.int32)
        for row, chunk in enumerate(chunks):
            blocks = chunk.member.blocks
            tables[row, : len(blocks)] = blocks
        whole = np.zeros((4, size), np.int64)
        whole[0, :num] = [chunk.member.tokens[chunk.start] for chunk in chunks]
        whole[1, :num] = [chunk.start for chunk in chunks]
        whole[2, :num] = [one.position for one in wanted]
        whole[3, :num] = [one.seed for one in wanted]
        its = self._send(whole)
        self._tables[:size, :width].copy_(self._send(tables), non_blocking=True)
        for buffer, row in zip((self._tokens, self._positions, self._answers, self._seeds), its, strict=True):
            buffer[:size].copy_(row)
        temperatures = np.ones(size, np.float32)
        temperatures[:num] = [one.sampling.temperature for one in wanted]
        self._temperatures[:size].copy_(torch.from_numpy(temperatures), non_blocking=True)
        self._cursor.zero_()

    def _graph(self, num: int) -> _Graph:
        size = next(one for one in self._sizes if one >= num)
        graph = self._graphs.get(size)
        if graph is None:
            graph = self._graphs[size] = self._capture(size)
        return graph

    def _capture(self, size: int) -> _Graph:
        began = time.monotonic()
        saved = [one.clone() for one in (self._tokens, self._positions, self._answers)]
        self._tables[:size].fill_(self._num_blocks)
        self._positions.zero_()
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                self._cursor.zero_()
                self._positions.zero_()
                self._decode(size)
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        self._cursor.zero_()
        self._positions.zero_()
        with torch.cuda.graph(graph, pool=self._graph_memory):
            self._decode(size)
        for buffer, one in zip((self._tokens, self._positions, self._answers), saved, strict=True):
            buffer.copy_(one)
        log.info("a graph for %d samples in %.1f s", size, time.monotonic() - began)
        return _Graph(graph, size)

    def _decode(self, size: int) -> None:
        """One step of the first rows, from and to the fixed places."""
        tokens, positions, answers = self._tokens[:size], self._positions[:size], self._answers[:size]
        splits = cuda.num_splits(size, self._loaded.num_kv_heads, self._num_processors)
        step = DecodeStep(self._tables[:size], positions, splits)
        logits = self._loaded.logits(self._hidden(tokens, positions, step)[0])
        numbers = self._uniforms(self._seeds[:size], answers)
        drawn, logprobs = cuda.draw(logits, self._temperatures[:size], numbers)
        cuda.note(drawn, logprobs, self._cursor, self._drawn, self._logprobs, tokens, positions, answers)
