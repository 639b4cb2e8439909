"""Runs steps on one NVIDIA GPU: prefill (prefill.py), and decoding from CUDA graphs, several steps at a time.

A graph holds a whole decoding step: the model, the draw, and the step to the next position; so replaying it again needs
nothing from the host. A *burst* replays it several times; meanwhile the host takes a *look* at what the first steps
brought, and the GPU does not wait for it. Graphs are made by batch size, rounded up; the rows that are too many write
into a block that is never read. For samples that are truncated there are graphs up to the logits; their draw follows.

A burst can be interrupted: few replays are ahead of the GPU, so that it ends a step or two later.

If batch-invariant, every matrix product has one shape regardless of the batch, and a row is added up in one order: all
decode steps have as many rows as there are slots; prompts are computed one at a time, in chunks that begin at fixed
places (batching.py) and are padded to one size (layout.py). Decoded tokens that are prefilled again, after a move or
because the cache was full, come from other kernels: they are not bitwise the same.

The decoder layers are compiled one for all (`compile`), or run as they are: slower, and ready at once.
"""

import logging
import time
from collections.abc import Callable, Sequence
from threading import Event
from typing import Any

import numpy as np
import torch

from polyrl.engines.builtin import packed, sampling
from polyrl.engines.builtin.batching import Chunk
from polyrl.engines.builtin.cuda import kernels
from polyrl.engines.builtin.cuda.graphs import Captured, Graphs
from polyrl.engines.builtin.cuda.kernels import DecodeStep, PrefillStep
from polyrl.engines.builtin.cuda.layout import lay_out, shape_of
from polyrl.engines.builtin.cuda.memory import BlockedKeysAndValues
from polyrl.engines.builtin.cuda.merging import merge_projections
from polyrl.engines.builtin.cuda.offloading import Offloading
from polyrl.engines.builtin.cuda.prefill import Prefill
from polyrl.engines.builtin.cuda.small_batch import MOST_ROWS, SmallBatch
from polyrl.engines.builtin.cuda.verifying import Verifying
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.builtin.steps import MAX_BURST, Drafted, Drawn, DrawRule, OnDrawn

log = logging.getLogger("polyrl.engines.builtin")

_SIZES = (
    *(2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896),
    *range(1024, 4096, 512),
)
"""None of one: layers that are compiled for any number of rows are compiled again for a single one. Those that are
written out (small_batch.py) have one."""
_AHEAD = 2
"""Replays that the GPU has waiting: enough that it never waits for the host."""
_LOOK_STEPS = 8
"""Steps of a burst that are looked at together, while the next ones run."""
_FUSED = {"combo_kernels": True, "combo_kernel_foreach_dynamic_shapes": True}
"""Fuses the work on queries and the work on keys into one kernel: 1.5% of a step's time."""

Tensor = torch.Tensor


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
        """`invariant_tokens`: the rows of a prompt's chunks if results are batch-invariant; 0 if they are not."""
        self._loaded = loaded
        self._num_blocks, self._block_tokens = num_blocks, block_tokens
        self._parameter = next(loaded.model.parameters())
        self._device = self._parameter.device
        torch.cuda.set_device(self._device)  # of the thread that runs steps: kernels, graphs and the cache go there
        packed.find_flash()
        self._num_processors = kernels.num_processors()
        self._any_mask = torch.zeros((1, 1, 1, 1), dtype=self._parameter.dtype, device=self._device)
        heads, dim = loaded.num_kv_heads, loaded.head_dim
        self._paged = BlockedKeysAndValues(
            loaded.num_layers, num_blocks, heads, block_tokens, dim, self._parameter.dtype
        )
        self._is_awake = False
        self._capturing = Graphs()
        self._graphs: dict[int, Captured] = {}
        self._graphs_to_logits: dict[int, Captured] = {}
        self._prefilling = Prefill(self._hidden, self._parameter, self._capturing)
        self._invariant_tokens = invariant_tokens
        slots = max(slots, _SIZES[0])
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
        self._uniforms = kernels.uniforms
        merge_projections(loaded.model)
        self._small = SmallBatch.find(loaded.model, width * block_tokens)
        sizes = _SIZES if self._small is None else (1, *_SIZES)
        self._sizes = [slots] if invariant_tokens else [*(one for one in sizes if one < slots), slots]
        self._offloading = Offloading(loaded.model) if offload else None
        self.wake()
        if compile_layers:
            torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
            for layer in loaded.model.model.layers:
                layer.compile(dynamic=True, options=_FUSED)
            self._uniforms = torch.compile(kernels.uniforms, dynamic=True)
        self._verifying = Verifying(
            loaded, self._hidden, self._uniforms, self._capturing,
            num_blocks=num_blocks, block_tokens=block_tokens, width=width, device=self._device,
        )  # fmt: skip

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
            self._forget_graphs()
            self._offloading.take_away()
        torch.cuda.empty_cache()

    def close(self) -> None:
        """Drop the cache, and leave all weights of the model in place: it may be another's."""
        self._forget_graphs()
        if self._offloading is not None:
            self._offloading.bring_back()
            self._offloading = None
        self.sleep()
        self._paged.close()

    def _forget_graphs(self) -> None:
        self._graphs.clear()
        self._graphs_to_logits.clear()
        self._prefilling.forget_graphs()
        self._verifying.forget_graphs()
        self._capturing.forget()

    def change_weights(self, write: Callable[[], None] | None) -> None:
        """Write new weights in place. Nothing is derived from them: graphs read them where they are."""
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

    @torch.inference_mode()
    def copy_blocks(self, copies: Sequence[tuple[int, int]]) -> None:
        self._paged.copy(*self._send(np.array(copies, np.int64)).unbind(1))

    @torch.inference_mode()
    def run(self, chunks: Sequence[Chunk], wanted: Sequence[DrawRule]) -> Drawn:
        """Run any step. `wanted` has an entry for each chunk that samples, in order.

        Decoding chunks run as one step from a graph, which reads contexts in place, while prefill copies them. If
        batch-invariant, every other chunk is a step by itself, and truncated samples are drawn one by one.
        """
        asked = dict(zip((number for number, chunk in enumerate(chunks) if chunk.samples), wanted, strict=True))
        decoding = [number for number in asked if chunks[number].decodes]
        truncated = [number for number in decoding if asked[number].sampling.truncates]
        plain = [number for number in decoding if not asked[number].sampling.truncates]
        others = sorted(set(range(len(chunks))) - set(decoding))
        drawn: dict[int, tuple[int, float]] = {}
        if plain:
            one = self.run_burst([chunks[at] for at in plain], [asked[at] for at in plain], 1)[0]
            drawn.update(zip(plain, zip(*one, strict=True), strict=True))
        on_gpu: list[tuple[list[int], tuple[Tensor, Tensor]]] = []
        """Drawn, and read when all is on its way."""
        at_once = 1 if self._invariant_tokens else len(chunks)
        if truncated:
            logits = self._decoded_logits([chunks[at] for at in truncated], [asked[at] for at in truncated])
            for first in range(0, len(truncated), at_once):
                some = truncated[first : first + at_once]
                its = logits[first : first + len(some)]
                on_gpu.append((some, self._draw(its, [asked[at] for at in some])))
        for first in range(0, len(others), at_once):
            some = others[first : first + at_once]
            hidden = self._prefill([chunks[at] for at in some])
            sampled = [at for at in some if at in asked]
            if sampled:
                on_gpu.append((sampled, self._draw(self._loaded.logits(hidden), [asked[at] for at in sampled])))
        for numbers, (tokens, logprobs) in on_gpu:
            drawn.update(zip(numbers, zip(tokens.tolist(), logprobs.tolist(), strict=True), strict=True))
        return Drawn([drawn[at][0] for at in asked], [drawn[at][1] for at in asked])

    def _prefill(self, chunks: Sequence[Chunk]) -> Tensor:
        """Return the wanted rows, as the last layer leaves them."""
        in_place = self._invariant_tokens
        shape = None
        if in_place or self._prefilling.has_graphs:
            shape = shape_of(chunks, self._loaded.model.config.hidden_size, in_place)
        its = lay_out(chunks, self._block_tokens, self._num_blocks, shape, in_place=in_place > 0)
        return self._prefilling.run(its, shape)[0].index_select(0, self._send(its.rows))

    def _draw(self, logits: Tensor, wanted: Sequence[DrawRule]) -> tuple[Tensor, Tensor]:
        draws = sampling.plan_draws(
            [one.sampling for one in wanted],
            [one.seed for one in wanted],
            [one.position for one in wanted],
            self._device,
        )
        if draws.truncated:
            return sampling.draw(logits, draws)
        return kernels.draw(logits, draws.temperatures, draws.uniforms)

    def _hidden(self, tokens: Tensor, positions: Tensor, step: DecodeStep | PrefillStep) -> Tensor:
        return self._loaded.model.model(
            input_ids=tokens.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            attention_mask=self._any_mask,
            use_cache=False,
            step=step,
        ).last_hidden_state

    def _send(self, numbers: "np.ndarray[Any, Any]") -> Tensor:
        return torch.from_numpy(numbers).to(self._device, non_blocking=True)

    # Decoding

    @torch.inference_mode()
    def run_burst(
        self,
        chunks: Sequence[Chunk],
        wanted: Sequence[DrawRule],
        num_steps: int,
        interrupted: Event | None = None,
        look: OnDrawn | None = None,
    ) -> list[Drawn]:
        """Decode `num_steps` tokens of each sample, fewer if interrupted; all chunks decode, and none is truncated.

        With a `look` it gets the steps as they come, and the last ones are returned.
        """
        size = self._size(len(chunks))
        graph = self._captured(self._graphs, size, self._decode).graph
        self._set_rows(chunks, wanted, size)
        num_seen = 0
        for step in range(num_steps):
            if step >= _AHEAD:
                self._done[step % _AHEAD].synchronize()
                num_done = step - _AHEAD + 1
                if look is not None and num_done - num_seen == _LOOK_STEPS:
                    with torch.cuda.stream(self._looking):
                        look(self._read(num_seen, num_done, len(chunks)))
                    num_seen = num_done
                if interrupted is not None and interrupted.is_set():
                    num_steps = step
                    break
            graph.replay()
            self._done[step % _AHEAD].record()
        return self._read(num_seen, num_steps, len(chunks))

    @torch.inference_mode()
    def prepare_rows(self, num_samples: int, rows: int) -> float:
        return self._verifying.prepare(num_samples, rows)

    @torch.inference_mode()
    def verify(self, samples: Sequence[Drafted], rows: int) -> list[Drawn]:
        return self._verifying.run(samples, rows)

    def _read(self, first: int, end: int, num: int) -> list[Drawn]:
        """Return the tokens that these steps of a burst drew."""
        tokens, logprobs = self._drawn[first:end, :num].tolist(), self._logprobs[first:end, :num].tolist()
        return [Drawn(*one) for one in zip(tokens, logprobs, strict=True)]

    def _set_rows(self, chunks: Sequence[Chunk], wanted: Sequence[DrawRule], size: int) -> None:
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

    def _decoded_logits(self, chunks: Sequence[Chunk], wanted: Sequence[DrawRule]) -> Tensor:
        """Return the logits of one decode step, valid until the next step."""
        size = self._size(len(chunks))
        captured = self._captured(self._graphs_to_logits, size, self._logits)
        self._set_rows(chunks, wanted, size)
        captured.graph.replay()
        return captured.result

    def _size(self, num: int) -> int:
        return next(one for one in self._sizes if one >= num)

    def _captured(self, graphs: dict[int, Captured], size: int, step: Callable[[int], Tensor | None]) -> Captured:
        """Return the graph of a size, captured if needed. Call it before the rows are set: a capture sets its own."""
        if size not in graphs:
            began = time.monotonic()
            self._tables[:size].fill_(self._num_blocks)
            graphs[size] = self._capturing.capture(lambda: step(size), self._go_to_start)
            log.info("a graph for %d samples in %.1f s", size, time.monotonic() - began)
        return graphs[size]

    def _go_to_start(self) -> None:
        self._cursor.zero_()
        self._positions.zero_()

    def _decode(self, size: int) -> None:
        """Run one decode step for the first `size` rows, from and to the fixed buffers."""
        logits = self._logits(size)
        tokens, positions, answers = self._tokens[:size], self._positions[:size], self._answers[:size]
        numbers = self._uniforms(self._seeds[:size], answers)
        drawn, logprobs = kernels.draw(logits, self._temperatures[:size], numbers)
        kernels.note(drawn, logprobs, self._cursor, self._drawn, self._logprobs, tokens, positions, answers)

    def _logits(self, size: int) -> Tensor:
        positions = self._positions[:size]
        splits = kernels.num_splits(size, self._loaded.num_kv_heads, self._num_processors)
        step = DecodeStep(self._tables[:size], positions, splits)
        if self._small is not None and size <= MOST_ROWS:
            return self._small.logits(self._tokens[:size], step)
        return self._loaded.logits(self._hidden(self._tokens[:size], positions, step)[0])
