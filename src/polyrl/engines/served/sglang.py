"""An SGLang server: how it is started, what it says, how it streams. Its version is in `versions`.

It takes token ids and gives token ids (`/generate`), and loads no tokenizer. The log-probability of a token is that
under the sampling temperature before truncation; greedy: that at temperature 1. Seeds count only where the server was
started with --enable-deterministic-inference, which its CPU backend refuses.
"""

import os
import tempfile
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from polyrl.engines.engine import EngineError
from polyrl.engines.served import checking, machine, model_files
from polyrl.engines.served.http import Events, Http, ServerAnswered, ServerUnreachable
from polyrl.engines.served.metrics import read_gauges
from polyrl.engines.served.server import (
    Asked,
    Command,
    End,
    Facts,
    JobRefused,
    Load,
    Part,
    ServedConfig,
    Span,
    Weighing,
    number,
    stream,
)
from polyrl.engines.served.sglang_weights import SglangWeighing

_ASK_S = 10.0
_FACTS_S = 120.0
"""It has just started, and so may have others on the same machine."""
_ENDS: dict[str, End] = {"stop": "stop", "length": "length", "abort": "aborted"}
_MARGIN_TOKENS = 8
"""It keeps a few tokens of a context to itself."""
_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
"""One whose detokenizer died looks at itself for 65 s before it ends, and its samples hang meanwhile."""


class _Finish(Struct):
    type: str
    message: str = ""
    status_code: int | None = None


class _Meta(Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[Span] | None = None
    completion_tokens: int = 0


class _Event(Struct):
    output_ids: list[int] = []
    meta_info: _Meta = msgspec.field(default_factory=_Meta)
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class SglangServer:
    def __init__(self, http: Http, config: ServedConfig) -> None:
        self.http = http
        self.tells_policy = True
        self.weighing: Weighing = SglangWeighing(http, config)
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="polyrl-sglang-")

    def command(self, port: int) -> Command:
        config = self._config
        model = model_files.read(config.model)
        flags = ["--model-path", config.model, "--host", "127.0.0.1", "--port", str(port)]
        flags += ["--served-model-name", "polyrl", "--skip-tokenizer-init", "--incremental-streaming-output"]
        flags += ["--enable-metrics", "--sampling-defaults", "openai", "--log-level-http", "warning"]
        environment = {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        environment |= {name: "0" for name in _DUMPS if name not in os.environ}
        kv_tokens, context = config.kv_tokens, config.max_context
        if machine.is_cpu(config):
            kv_tokens, context = machine.cpu_kv_tokens(config), machine.cpu_context(config, model.max_context)
            flags += ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--disable-overlap-schedule"]
            flags += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            # What others take of the memory while it loads counts as its own. Its cache has a size of its own, below.
            flags += ["--mem-fraction-static", "0.8", "--sleep-on-idle"]
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.threads)}
        if kv_tokens is not None:
            flags += ["--max-total-tokens", str(kv_tokens)]
        if context is not None:
            flags += ["--context-length", str(context)]
        slots = machine.slots(config)
        if slots is not None:
            flags += ["--max-running-requests", str(slots)]
        if "--config" in config.flags:
            raise EngineError("--config: the worker has one of its own; give SGLang its flags one by one")
        flags += ["--config", self._write_key()]
        argv = [machine.python_of(config), "-m", "sglang.launch_server"]
        return Command(
            [*argv, *flags, *self.weighing.flags(), *config.flags], {**environment, **self.weighing.environment()}
        )

    def _write_key(self) -> str:
        """A file that only we can read: other users see the flags of a process."""
        path = Path(self._folder.name) / "key.yaml"
        path.write_bytes(msgspec.json.encode({"api-key": self.http.key}))
        return str(path)

    async def is_ready(self) -> bool:
        """While it is paused it calls itself unready, and is well all the same."""
        for path in ("/ready", "/health"):
            try:
                await self.http.get(path, timeout_s=_ASK_S, text=True)
            except ServerUnreachable:
                return False
            except ServerAnswered:
                continue
            return True
        return False

    async def facts(self) -> Facts:
        try:
            said = await self.http.get("/server_info", timeout_s=_FACTS_S)
            slots = sum(int(one["effective_max_running_requests_per_dp"]) for one in said["internal_states"])
            kv_tokens = int(said["max_total_num_tokens"])
            context = int(said["max_req_input_len"]) - _MARGIN_TOKENS
            model = await self.http.get("/model_info", timeout_s=_FACTS_S)
            label = str(model["weight_version"])
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"/server_info says something else than expected: {error!r}") from error
        if not said.get("incremental_streaming_output"):
            raise EngineError("an SGLang server needs --incremental-streaming-output")
        if self._config.url:
            checking.check_served(self._config.model, str(model.get("model_path", "")))
        files = model_files.read(self._config.model)
        return Facts(files.name, slots, kv_tokens, context, files.vocab, files.end_ids, label)

    def stream(self, request: str, asked: Asked) -> AbstractAsyncContextManager[Events[Part]]:
        body = {"rid": request, "input_ids": asked.tokens, "stream": True, "return_logprob": True}
        body["sampling_params"] = _sampling(asked)
        return stream(self.http, "/generate", body, _parts)

    async def abort(self, request: str) -> None:
        await self.http.post("/abort_request", {"rid": request}, timeout_s=_ASK_S)

    async def load(self) -> Load:
        gauges = read_gauges(await self.http.get("/metrics", timeout_s=_ASK_S, text=True), "sglang:")
        return Load(
            num_running=int(sum(gauges.get("num_running_reqs", ()))),
            num_waiting=int(sum(gauges.get("num_queue_reqs", ()))),
            kv_used=max(gauges.get("token_usage", ()), default=0.0),
            num_preemptions=int(sum(gauges.get("num_retracted_reqs", ()))),
        )


def _sampling(asked: Asked) -> dict[str, Any]:
    """`ignore_eos` has it ignore stop ids too; they are then looked for on our side."""
    sampling = asked.sampling
    return {
        "max_new_tokens": asked.max_new,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k if sampling.top_k else -1,
        "min_p": sampling.min_p,
        "sampling_seed": asked.seed,
        "ignore_eos": sampling.ignore_eos,
        "stop_token_ids": asked.end_ids,
    }


def _parts(data: bytes) -> tuple[Part]:
    event = _decode(data)
    if event.error is not None:
        said = event.error.get("message", event.error)
        if event.error.get("code") == 400:  # it refuses within a stream that it has begun already
            raise JobRefused(str(said))
        raise EngineError(f"the server failed: {said}")
    return (_part(event),)


def _part(event: _Event) -> Part:
    meta = event.meta_info
    finish = meta.finish_reason
    if finish is not None and finish.type == "abort":
        if finish.status_code == 400:
            raise JobRefused(finish.message)
        return Part((), (), "aborted")  # its last token may come a second time
    logprobs = [number(one[0]) for one in meta.output_token_logprobs]
    if finish is None:
        return Part(event.output_ids, logprobs)
    if finish.type not in _ENDS:
        raise EngineError(f"the server ended an answer with {finish.type!r}")
    spans = meta.weight_versions or ()
    return Part(event.output_ids, logprobs, _ENDS[finish.type], spans)
