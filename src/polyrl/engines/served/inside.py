"""All of ours that runs inside a server's processes: taking a version of the weights, and what a server calls by name.

It runs in the environment that the server was installed in, so it may use the standard library, torch and `between`,
and nothing else of PolyRL. A server calls three names of this module:

    Guard             vLLM's `--middleware`: refuses every request without the key
    PolyrlExtension   vLLM's `--worker-extension-cls`: takes a version; reports log-probabilities as other engines do
    sglang_load       SGLang's `--custom-weight-loader`: takes a version

An install, as each rank plays it; `installing` is the worker's side:

    rank -> worker   which rank this is            (how many there are; which slice of the model it holds)
    worker -> rank   the version's tensors, where each lies, and the file they are in, as a descriptor
    rank -> worker   ready, or why not             nothing has been written so far
    worker -> rank   go                            once all are ready; a closed connection means: leave it
    rank -> worker   done, or what went wrong      and digests of parameters, read back

Rules kept here: the file is mapped for reading only, and only if no process can shorten it. Tensors are views of it;
none is left when an install has ended, since the next version may take its place. An install raises nothing: an
exception may end the server, so the worker is told instead.
"""

# pyright: reportMissingImports=false

import fcntl
import gc
import hashlib
import hmac
import json
import logging
import math
import mmap
import os
import socket
import warnings
import weakref
from collections.abc import Awaitable, Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from polyrl.engines.served.between import HEAD_BYTES, KEY_VARIABLE, LENGTH, SOCKET_VARIABLE, peer_uid

_PATIENCE_S = 900.0

Tensors = Iterator[tuple[str, torch.Tensor]]
LoadTensors = Callable[[Tensors], None]


class Rank(NamedTuple):
    """The process that takes: one of `num_ranks`, with one of `num_slices` slices of every layer that it holds."""

    rank: int
    num_ranks: int
    slice: int
    num_slices: int


def take(name: str, rank: Rank, model: torch.nn.Module, load: LoadTensors) -> None:
    """Install what the worker that listens at `name` hands over."""
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as worker:
            worker.settimeout(_PATIENCE_S)
            worker.connect("\0" + name)
            if peer_uid(worker) not in (os.getuid(), 0):
                return
            _converse(worker, rank, model, load)
    except OSError:  # the worker is gone; it knows from the broken connection that this rank did not answer
        return


def _converse(worker: socket.socket, rank: Rank, model: torch.nn.Module, load: LoadTensors) -> None:
    _tell(worker, rank._asdict())
    offer, fd = _hear_offer(worker)
    try:
        problem = _misfit(offer, fd, rank, model)
        _tell(worker, {"problem": problem})
        if not problem and _hear(worker).get("go"):
            _tell(worker, _install(offer, fd, model, load))
    finally:
        os.close(fd)


def _install(offer: dict[str, Any], fd: int, model: torch.nn.Module, load: LoadTensors) -> dict[str, Any]:
    try:
        mapping = _load(offer, fd, load)
        if mapping() is not None:
            gc.collect()  # tensors that a loader left in a cycle
        if mapping() is not None:
            return {"problem": "the server keeps tensors of the version that lie in the worker's memory"}
        return {"problem": "", "heads": read_back(model, offer)}
    except Exception as error:  # noqa: BLE001  whatever a server's loaders raise: see the module
        return {"problem": _line(error)}


def _load(offer: dict[str, Any], fd: int, load: LoadTensors) -> "weakref.ref[mmap.mmap]":
    """Load the weights from the mapping. It is not closed, which would pull it away from under a tensor: it goes with
    the last of them."""
    mapped = mmap.mmap(fd, max(offer["num_bytes"], 1), prot=mmap.PROT_READ)
    load(_tensors(offer, memoryview(mapped)))
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return weakref.ref(mapped)


def _misfit(offer: dict[str, Any], fd: int, rank: Rank, model: torch.nn.Module) -> str:
    """Why the version is not for this model; empty when it is.

    Parameters whose names are in the version are compared. For the rest, which a server fuses and packs, the worker has
    compared names and shapes with those of the model's directory.
    """
    if not fcntl.fcntl(fd, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK:
        return "the worker's file can be shortened while it is read"
    if os.fstat(fd).st_size < offer["num_bytes"]:
        return f"a file of {os.fstat(fd).st_size} bytes for {offer['num_bytes']} bytes of weights"
    parameters = dict(model.named_parameters())
    for name, dtype, shape, _ in offer["tensors"]:
        ours = parameters.get(name)
        if ours is None or ours.numel() == 0:
            continue
        if (name in offer["probes"] or name.endswith("norm.weight")) and not _is_slice(ours, shape, rank.num_slices):
            return f"{name} has shape {shape} in the version, {list(ours.shape)} in the server: it is of another model"
        if not ours.is_floating_point():
            continue
        if ours.dtype != _dtype(dtype) and not offer["any_dtype"]:
            return f"{name}: {dtype} in the version, {str(ours.dtype)[6:]} in the server; start it with --dtype {dtype}"
    return ""


def _is_slice(ours: torch.Tensor, shape: list[int], num_slices: int) -> bool:
    """Return whether a table or a vector may be a rank's part of a tensor of that shape. A table's rows are cut, and
    padded."""
    if ours.dim() != len(shape):
        return False
    if ours.dim() == 1:
        return ours.shape[0] in (shape[0], shape[0] // num_slices)
    return ours.shape[0] * num_slices >= shape[0] and list(ours.shape[1:]) == shape[1:]


def _tensors(offer: dict[str, Any], view: memoryview) -> Tensors:
    for name, dtype, shape, start in offer["tensors"]:
        yield name, _tensor(view, dtype, shape, start)


def _tensor(view: memoryview, dtype: str, shape: list[int], start: int) -> torch.Tensor:
    kind, count = _dtype(dtype), math.prod(shape)
    if count == 0:
        return torch.empty(shape, dtype=kind)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="The given buffer is not writable")
        return torch.frombuffer(view, dtype=kind, count=count, offset=start).view(shape)


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found


def read_back(model: torch.nn.Module, offer: dict[str, Any]) -> dict[str, tuple[str, list[int], str]]:
    """Dtype, shape and a digest of the first bytes of parameters; of those that this model still has as they are."""
    parameters: Mapping[str, torch.Tensor] = dict(model.named_parameters())
    dtypes = {name: _dtype(dtype) for name, dtype, _, _ in offer["tensors"]}
    found: dict[str, tuple[str, list[int], str]] = {}
    for name in offer["probes"]:
        ours = parameters.get(name)
        if ours is None or ours.numel() == 0 or not ours.is_contiguous():
            continue
        dtype = dtypes.get(name, ours.dtype)
        if torch.promote_types(dtype, ours.dtype) != ours.dtype:
            dtype = ours.dtype  # the server has rounded it: nobody can compare its bytes
        head = ours.detach().view(-1)[: HEAD_BYTES // dtype.itemsize].cpu()
        narrow = head.to(dtype)
        if not torch.equal(narrow.to(head.dtype), head):
            narrow = head  # no number of the version's: its digest is another, too
        digest = hashlib.blake2b(narrow.view(torch.uint8).numpy().tobytes(), digest_size=16).hexdigest()
        found[name] = (str(dtype)[6:], list(ours.shape), digest)
    return found


def _tell(worker: socket.socket, what: dict[str, Any]) -> None:
    raw = json.dumps(what).encode()
    worker.sendall(LENGTH.pack(len(raw)) + raw)


def _hear(worker: socket.socket) -> dict[str, Any]:
    return json.loads(_exactly(worker, LENGTH.unpack(_exactly(worker, LENGTH.size))[0]))


def _hear_offer(worker: socket.socket) -> tuple[dict[str, Any], int]:
    head, fds, _, _ = socket.recv_fds(worker, LENGTH.size, 1)
    try:
        if len(fds) != 1:
            raise ConnectionError("an offer without a file")
        head += _exactly(worker, LENGTH.size - len(head))
        return json.loads(_exactly(worker, LENGTH.unpack(head)[0])), fds[0]
    except BaseException:
        for fd in fds:
            os.close(fd)
        raise


def _exactly(worker: socket.socket, num_bytes: int) -> bytes:
    raw = bytearray()
    while len(raw) < num_bytes:
        more = worker.recv(min(num_bytes - len(raw), 1 << 20))
        if not more:
            raise ConnectionError("the worker hung up")
        raw += more
    return bytes(raw)


def _line(error: BaseException) -> str:
    said = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {said}"[:500]


def sglang_load(model: Any, named_tensors: object) -> None:
    """Take a version. SGLang calls this for /update_weights_from_tensor with the request's tensors, of which there are
    none: the name that the worker listens under is in the server's environment."""
    try:
        rank = _rank()
    except (ImportError, AttributeError):  # an SGLang of another version; an exception here would end the server
        logging.getLogger(__name__).exception("no weights are taken: this SGLang does not say which rank this is")
        return
    take(os.environ.get(SOCKET_VARIABLE, ""), rank, model, model.load_weights)


def _rank() -> Rank:
    import torch.distributed
    from sglang.srt.runtime_context import get_parallel

    here: Any = get_parallel()
    return Rank(torch.distributed.get_rank(), torch.distributed.get_world_size(), here.tp_rank, here.tp_size)


class PolyrlExtension:
    """Becomes part of vLLM's worker, so its methods carry our name. vLLM's own loaders take each rank's slice."""

    def polyrl_tell_policy(self) -> None:
        tell_policy()

    def polyrl_install(self, socket_name: str) -> None:
        from vllm.config import set_current_vllm_config
        from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size

        worker: Any = self
        runner, config = worker.model_runner, worker.vllm_config
        model = runner.get_model()

        def load(tensors: Tensors) -> None:
            runner.reload_weights(weights_iterator=tensors)
            _process_tied_tables(model)

        num_ranks = config.parallel_config.world_size
        rank = Rank(worker.rank, num_ranks, get_tensor_model_parallel_rank(), get_tensor_model_parallel_world_size())
        with set_current_vllm_config(config):
            take(socket_name, rank, model, load)


def _process_tied_tables(model: Any) -> None:
    """Process the other layers of a shared table: `reload_weights` processes only one. On the CPU the head keeps a
    packed copy of the table, and would go on with the old one: embeddings of the new version, logits of the old."""
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    seen: set[int] = set()
    for layer in model.modules():
        method: Any = getattr(layer, "quant_method", None)
        if isinstance(method, UnquantizedEmbeddingMethod):
            if id(layer.weight) in seen:
                method.process_weights_after_loading(layer)
            seen.add(id(layer.weight))


Receive = Callable[[], Awaitable[Any]]
SendAsgi = Callable[[dict[str, Any]], Awaitable[None]]


class Guard:
    """An ASGI middleware that answers 401, on every route, to requests without the key. Raises KeyError without a key.

    vLLM's own key guards some routes only; those that change weights and call methods are not among them.
    """

    def __init__(self, app: Callable[[Any, Receive, SendAsgi], Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[KEY_VARIABLE]}".encode()

    async def __call__(self, scope: Any, receive: Receive, send: SendAsgi) -> None:
        if scope["type"] == "lifespan" or hmac.compare_digest(self._given(scope), self._expected):
            await self._app(scope, receive, send)
        elif scope["type"] == "http":
            await send({"type": "http.response.start", "status": 401, "headers": [(b"content-length", b"0")]})
            await send({"type": "http.response.body", "body": b""})
        else:
            await send({"type": "websocket.close", "code": 1008})

    def _given(self, scope: Any) -> bytes:
        return next((value for name, value in scope["headers"] if name.lower() == b"authorization"), b"")


_MARK = "polyrl_tells_policy"
_GREEDY = 1e-5

DrawTokens = Callable[..., tuple[Any, Any]]


def tell_policy() -> None:
    """Have vLLM report log-probabilities after temperature and before truncation. May be called twice.

    vLLM offers those before temperature (`raw_logprobs`), or those after top-k, top-p and min-p
    (`processed_logprobs`). The trainer's are of the whole softmax at the sampling temperature, so a ratio with the
    latter would not be 1 for the same weights: a token's would be too small by the share that truncation kept. Both of
    vLLM's samplers are wrapped: where a batch truncates, the temperature alone is applied once more, and the result is
    reported. Drawing is left as it is.
    """
    from vllm.v1.sample.sampler import Sampler

    wrap(Sampler, of_sampler)
    try:
        from vllm.v1.worker.gpu.sample.sampler import Sampler as NewerSampler
    except ImportError:  # its kernels are not there, and so it does not run
        return
    wrap(NewerSampler, of_newer_sampler)


def wrap(sampler: Any, how: Callable[[DrawTokens], DrawTokens]) -> None:
    if not hasattr(sampler, _MARK):
        sampler.sample = how(sampler.sample)
        setattr(sampler, _MARK, True)


def of_sampler(original: DrawTokens) -> DrawTokens:
    """Wrap a sampler whose `sample` returns log-probabilities beside the tokens, and divides the logits in place."""

    def sample(self: Any, logits: torch.Tensor, sampling_metadata: Any, *args: Any, **more: Any) -> tuple[Any, Any]:
        told = _of_policy(logits, sampling_metadata.temperature) if _truncates(sampling_metadata) else None
        tokens, processed = original(self, logits, sampling_metadata, *args, **more)
        return tokens, processed if told is None or processed is None else told

    return sample


def _truncates(metadata: Any) -> bool:
    if metadata.all_greedy:
        return False
    if metadata.top_k is not None or metadata.top_p is not None:
        return True
    return any(getattr(one, "min_p_count", 0) for one in metadata.logitsprocs.argmax_invariant)


def _of_policy(logits: torch.Tensor, temperature: torch.Tensor) -> torch.Tensor:
    scaled = logits / torch.where(temperature < _GREEDY, 1.0, temperature).unsqueeze(1)
    return scaled.log_softmax(-1, dtype=torch.float32)


def of_newer_sampler(original: DrawTokens) -> DrawTokens:
    """Wrap a sampler whose `sample` returns logits beside the tokens; its caller makes log-probabilities of them."""

    def sample(self: Any, logits: torch.Tensor, rows: Any, requests: Any, numbers: Any, *args: Any, **more: Any) -> Any:
        tokens, processed = original(self, logits, rows, requests, numbers, *args, **more)
        states = self.sampling_states
        if states.get_top_k_top_p(rows, numbers) == (None, None) and not (states.min_p.np[numbers] != 0.0).any():
            return tokens, processed
        scaled = torch.empty_like(logits, dtype=torch.float32).copy_(logits)
        states.apply_temperature(scaled, rows, numbers)
        return tokens, scaled

    return sample
