"""The policy: a Hugging Face causal language model that trains on packs, with the same modules that the engine runs.

    policy = Policy.load("DIR", dtype="bfloat16", device="cuda")
    engine = BuiltinEngine(config, policy.loaded)         # no parameter is held twice

A forward call takes a pack (packing.py) as one flat row and returns log-probabilities and entropies of its answer
tokens. The model stays in evaluation mode, without dropout, so that trainer and engine compute the same function.

Left out: when the device generates and when it trains (devices.py). Only one of the two runs at a time.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from torch.utils.checkpoint import checkpoint

from polyrl.engines.builtin import models, packed
from polyrl.engines.builtin.long_attention import can_attend, keep_results
from polyrl.engines.builtin.models import Loaded
from polyrl.engines.engine import EngineError
from polyrl.errors import UserError
from polyrl.trainer import contexts, families, logprobs
from polyrl.trainer.logprobs import HeadSettings
from polyrl.trainer.packing import Ints, Pack
from polyrl.trainer.ranks import Context
from polyrl.weights.manifest import AdapterFacts

Tensor = torch.Tensor
T = TypeVar("T")


_MAX_CPU_CACHE_TOKENS = 1 << 20
_OPTIMIZER_BYTES = 16
"""The bytes of a parameter in float32, its gradient, and two moments."""
_CACHE_SHARE = 0.6


class Scores(NamedTuple):
    """Numbers for each answer token of a pack, float32."""

    logprobs: Tensor
    entropy: Tensor


class Divided(NamedTuple):
    """A model that is sharded over ranks (sharding.py), used in place of the loaded one."""

    model: Any
    within: Callable[[Callable[[], Any]], Any]
    """Runs a function that needs parameters outside the layers."""
    dtype: torch.dtype
    """The dtype that the model computes in."""
    num_ranks: int
    context: Context | None = None
    """The ranks that have parts of the same samples, if each sample is divided too."""


class _Own(NamedTuple):
    """A rank's share of a pack."""

    rows: range
    predicting: Ints
    """Which of these rows predict drawn tokens."""
    targets: Ints
    num_targets: int
    """The number of those that count."""


class Scorer(Protocol):
    """A model that gives log-probabilities: a policy, or the reference that it is compared with."""

    def score_only(self, pack: Pack, temperature: float = 1.0) -> Scores: ...


class Policy:
    """A model that is trained. `compile_layers` is for half precision on a GPU, and ignored elsewhere."""

    def __init__(
        self,
        loaded: Loaded,
        *,
        gradient_checkpointing: bool = False,
        compile_layers: bool = False,
        divided: Divided | None = None,
    ) -> None:
        """`divided` is the sharded model to train; `loaded` is then the engine's own copy."""
        self.loaded = loaded
        self._divided = divided
        self.model: Any = (loaded.model if divided is None else divided.model).eval()
        self.gradient_checkpointing = gradient_checkpointing
        parameter = next(self.model.parameters())
        self.device: torch.device = parameter.device
        self.dtype: torch.dtype = parameter.dtype if divided is None else divided.dtype
        config = self.model.config.get_text_config()
        self._flash = (
            self.device.type == "cuda"
            and loaded.rows == "packed"
            and self.dtype in (torch.bfloat16, torch.float16)
            and getattr(config, "attn_logit_softcapping", None) is None
            and packed.find_flash()
        )
        self._long = self._flash and can_attend(self.dtype, loaded.head_dim)
        self._context = None if divided is None else divided.context
        if self._context is not None:
            contexts.check(loaded.name, loaded.rows, config.num_attention_heads, self._context.size)
        self.compiled = (
            compile_layers and self._flash and self._context is None
        )  # without flash attention there are too many shapes to compile
        self._layers = families.layers_of(self.model)
        self._any_mask = torch.zeros((1, 1, 1, 1), dtype=self.dtype, device=self.device)
        """transformers passes a mask of four dimensions on unchanged. Our attention never reads this one."""
        if self.compiled:
            self._compile_layers()

    base_fingerprint: str = ""
    """The fingerprint of the frozen base weights, if only low-rank changes to them are trained."""

    @classmethod
    def load(
        cls,
        folder: str,
        dtype: str = "float32",
        device: str = "cpu",
        *,
        gradient_checkpointing: bool = False,
        compile_layers: bool = False,
    ) -> "Policy":
        """Load a model directory. Raises UserError, in a line that names the directory."""
        return cls(
            load_model(folder, dtype, device),
            gradient_checkpointing=gradient_checkpointing,
            compile_layers=compile_layers,
        )

    def freeze(self) -> "Policy":
        """Make the policy a reference: none of it is ever trained."""
        self.model.requires_grad_(False)
        return self

    def parameters(self) -> dict[str, Tensor]:
        """Return the trained parameters by name; tied ones appear once."""
        return dict(self.model.named_parameters())

    # For engines and workers

    def published(self) -> dict[str, Tensor]:
        """Return the tensors of a version. Call this every time: an engine may have moved them."""
        return self.parameters()

    @property
    def published_dtype(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    adapter: AdapterFacts | None = None
    """Facts about the base, for versions that hold low-rank changes only."""

    @property
    def has_own_engine_copy(self) -> bool:
        """Whether a whole model lies beside our shards, for the local engine."""
        return self._divided is not None and self.loaded.model is not self.model

    def served_parts(self) -> Iterator[tuple[str, Tensor]]:
        """Yield this rank's part of each tensor of the whole model, as engines run it. All ranks iterate together."""
        for name, one in self.parameters().items():
            yield name, one.detach().to(self.dtype)

    def engine_writer(self) -> Callable[[], None] | None:
        """Return a function that writes the current weights into the local engine's own copy. None: the engine shares
        ours."""
        return None

    def max_cache_tokens(self) -> int:
        """Return how many tokens the KV cache of an engine on this device may hold, with room left for the optimizer.
        The engine sleeps while we train."""
        if self.device.type != "cuda":
            return _MAX_CPU_CACHE_TOKENS
        num_parameters = sum(one.numel() for one in self.parameters().values())
        if self._divided is not None:
            num_parameters //= self._divided.num_ranks
        free = torch.cuda.mem_get_info(self.device)[0] - _OPTIMIZER_BYTES * num_parameters
        return max(1024, int(_CACHE_SHARE * free / self.loaded.token_bytes(self.dtype.itemsize)))

    def score(self, pack: Pack, temperature: float = 1.0, *, entropy_grad: bool = False) -> Scores:
        """Score the answer tokens of a pack, with gradients if torch has them enabled."""
        scale = self.loaded.logit_scale
        if scale != 1.0:
            temperature = (1.0 if temperature < logprobs.GREEDY else temperature) / scale
        settings = HeadSettings(temperature, self.loaded.logit_softcap, compiled=self.compiled)

        def score() -> Scores:
            head = self.model.get_output_embeddings()
            rows, targets, weight = self._hidden(pack), self._send(self._own(pack).targets), head.weight
            if getattr(head, "bias", None) is not None:  # as one more column, for hidden states that are 1 there
                weight = torch.cat([weight, head.bias.unsqueeze(1)], 1)
                rows = torch.cat([rows, rows.new_ones((rows.shape[0], 1))], 1)
            found = logprobs.of_tokens(rows, weight, targets, settings, entropy_grad=entropy_grad)
            return Scores(*(self.whole(one, pack) for one in found))

        return self._within(score)

    def hidden(self, pack: Pack) -> Tensor:
        """Return (answer tokens, width): the last hidden states of the rows that predict the answer tokens. Where
        samples are divided between ranks, of those that are here: `whole` gives all of what is made of them."""
        return self._within(lambda: self._hidden(pack))

    def whole(self, numbers: Tensor, pack: Pack) -> Tensor:
        """Return the numbers of all answer tokens, of those that are here."""
        if self._context is None:
            return numbers
        counts = [self._own(pack, rank).num_targets for rank in range(self._context.size)]
        return contexts.whole(self._context, numbers[: counts[self._context.rank]], counts)

    def _own(self, pack: Pack, rank: int | None = None) -> "_Own":
        """Return what a rank has of a pack, this one unless another is given. A rank with nothing to predict predicts
        a token that does not count, so that it takes part in everything."""
        if self._context is None:
            return _Own(range(len(pack.tokens)), pack.predicting, pack.targets, len(pack.targets))
        num_rows = -(-len(pack.tokens) // self._context.size) * self._context.size
        rows = contexts.part(self._context._replace(rank=self._context.rank if rank is None else rank), num_rows)
        first, end = np.searchsorted(pack.predicting, [rows.start, rows.stop])
        predicting, targets = pack.predicting[first:end] - rows.start, pack.targets[first:end]
        if not len(targets):
            return _Own(rows, np.zeros(1, np.int64), pack.targets[:1], 0)
        return _Own(rows, predicting, targets, len(targets))

    def _within(self, work: Callable[[], T]) -> T:
        return work() if self._divided is None else self._divided.within(work)

    def _hidden(self, pack: Pack) -> Tensor:
        if self.loaded.rows != "packed":
            return self._hidden_beside(pack)
        own, tokens, positions, lengths = self._own(pack), pack.tokens, pack.positions, list(pack.lengths)
        if self._context is not None:
            added = len(own.rows) * self._context.size - len(tokens)
            tokens, positions = np.pad(tokens, (0, added)), np.pad(positions, (0, added), mode="edge")
            lengths[-1] += added  # what follows a sample's last token is seen by nothing
        layout: Any = packed.lay_out(lengths, self.device, flash=self._flash, long=self._long)
        if self._context is not None:
            layout = contexts.layout(self._context, layout)
        mine = slice(own.rows.start, own.rows.stop)
        with self._checkpointing():
            hidden = self.model.base_model(
                input_ids=self._send(tokens[mine]).unsqueeze(0),
                position_ids=self._send(positions[mine]).unsqueeze(0),
                attention_mask=self._any_mask,
                use_cache=False,
                pack=layout,
            ).last_hidden_state[0]
        return hidden.index_select(0, self._send(own.predicting))

    def _hidden_beside(self, pack: Pack) -> Tensor:
        """Do the same with samples side by side, padded, and the model's own attention. Ranks that share a model run
        it equally often in a pass: once, with all samples."""
        groups: list[list[int]] = packed.group_alike(pack.lengths)
        if self._divided is not None:
            groups = [list(range(len(pack.lengths)))]
        elif self.loaded.rows == "alone":
            groups = [[one] for one in range(len(pack.lengths))]
        layout = packed.lay_out_buckets(pack.lengths, self.device, groups)
        tokens, found, place = self._send(pack.tokens).index_select(0, layout.there), list[Tensor](), 0
        with self._checkpointing():
            for num, longest in layout.sizes:
                its = tokens[place : place + num * longest].view(num, longest)
                found.append(self.model.base_model(input_ids=its, use_cache=False)[0].flatten(0, 1))
                place += num * longest
        return torch.cat(found).index_select(0, layout.back).index_select(0, self._send(pack.predicting))

    @torch.no_grad()
    def score_only(self, pack: Pack, temperature: float = 1.0) -> Scores:
        return self.score(pack, temperature)

    def _send(self, numbers: Any) -> Tensor:
        return torch.from_numpy(numbers).to(self.device, non_blocking=True)

    def _compile_layers(self) -> None:
        """Compile the layers. One compilation serves all of them: nothing in a layer depends on its index."""
        torch._dynamo.config.recompile_limit = max(64, torch._dynamo.config.recompile_limit)
        for layer in self._layers:
            if layer._compiled_call_impl is None:
                layer.compile(dynamic=True)

    @contextmanager
    def _checkpointing(self) -> Iterator[None]:
        """Let layers keep only their input, and what attention gave for long samples, and run again in the backward
        pass. The engine never sees them in this mode."""
        if not (self.gradient_checkpointing and torch.is_grad_enabled()):
            yield
            return
        for layer in self._layers:
            layer._gradient_checkpointing_func = partial(checkpoint, use_reentrant=False, context_fn=keep_results)
            layer.gradient_checkpointing = layer.training = True
        try:
            yield
        finally:
            for layer in self._layers:
                layer.gradient_checkpointing = layer.training = False


def is_about_memory(error: RuntimeError) -> bool:
    """Return whether torch has run out of memory: of a device, of the host, or of pinned memory."""
    said = str(error)
    return isinstance(error, torch.OutOfMemoryError) or "allocate memory" in said or "out of memory" in said


def load_model(folder: str, dtype: str, device: str) -> Loaded:
    """Load a model directory. Raises UserError, in a line that names the directory."""
    try:
        if families.is_of_engine(folder):
            return models.load(folder, dtype, device)
        return families.load(folder, dtype, device)
    except EngineError as error:
        raise UserError(str(error)) from error
