"""An SGLang server: how it is started, what it says, how it streams. Its version is in `versions`.

It takes token ids and gives token ids (`/generate`), and loads no tokenizer. The log-probability of a token is that
under the sampling temperature before truncation; greedy: that at temperature 1. Seeds count only where the server was
started with --enable-deterministic-inference, which its CPU backend refuses.
"""

import base64
import os
import pickle
import tempfile
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served import installing
from polyrl.engines.served.between import SOCKET_VARIABLE
from polyrl.engines.served.http import EventStream, Http, ServerAnswered, ServerUnreachable, read_gauges
from polyrl.engines.served.installing import PUT_S, OurModules, StagedVersion, hand_over, labelled, new_name, stage
from polyrl.engines.served.server import (
    AnswerPart,
    Facts,
    JobRefused,
    LabelSpan,
    LaunchCommand,
    ServedConfig,
    ServedEnd,
    ServerBroken,
    ServerLoad,
    ServerRequest,
    WeightLoading,
    facts_of,
    number,
    stream,
)

_REQUEST_S = 10.0
_FACTS_S = 120.0
"""It has just started, and so may have others on the same machine."""
_ENDS: dict[str, ServedEnd] = {"stop": "stop", "length": "length", "abort": "aborted"}
_MARGIN_TOKENS = 8
"""It keeps a few tokens of a context to itself."""
_DUMPS = ("SGLANG_PYSPY_DUMP_BEFORE_CRASH", "SGLANG_CUDA_COREDUMP_BEFORE_CRASH")
"""Off: a server whose detokenizer died would write dumps for 65 s before it ends, while its samples hang."""


class _Finish(Struct):
    type: str
    message: str = ""
    status_code: int | None = None


class _Meta(Struct):
    finish_reason: _Finish | None = None
    output_token_logprobs: list[tuple[float | None, int, Any]] = []
    weight_versions: list[LabelSpan] | None = None
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
        self.loading: WeightLoading = SglangWeightLoading(http, config)
        self._config = config
        self._folder = tempfile.TemporaryDirectory(prefix="polyrl-sglang-")

    def command(self, port: int) -> LaunchCommand:
        config = self._config
        model = facts_of(config.model)
        flags = ["--model-path", config.model, "--host", "127.0.0.1", "--port", str(port)]
        flags += ["--served-model-name", "polyrl", "--skip-tokenizer-init", "--incremental-streaming-output"]
        flags += ["--enable-metrics", "--sampling-defaults", "openai", "--log-level-http", "warning"]
        environment = {"HF_HUB_OFFLINE": "1", "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0"}
        environment |= {name: "0" for name in _DUMPS if name not in os.environ}
        kv_tokens, context = config.kv_tokens, config.max_context
        if config.is_on_cpu:
            kv_tokens, context = config.cpu_kv_tokens, config.cpu_context(model.max_context)
            flags += ["--device", "cpu", "--dtype", "float32", "--disable-cuda-graph", "--disable-overlap-schedule"]
            flags += ["--attention-backend", "torch_native", "--sampling-backend", "pytorch"]
            # SGLang counts memory that others take while it loads as its own. The size of its cache is set below.
            flags += ["--mem-fraction-static", "0.8", "--sleep-on-idle"]
            environment |= {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": str(config.threads)}
        if kv_tokens is not None:
            flags += ["--max-total-tokens", str(kv_tokens)]
        if context is not None:
            flags += ["--context-length", str(context)]
        slots = config.num_slots
        if slots is not None:
            flags += ["--max-running-requests", str(slots)]
        flags += _speculation(config)
        if "--config" in config.flags:
            raise EngineError("--config: the worker has one of its own; give SGLang its flags one by one")
        flags += ["--config", self._write_key()]
        argv = [config.interpreter, "-m", "sglang.launch_server"]
        return LaunchCommand(
            [*argv, *flags, *self.loading.flags(), *config.flags], {**environment, **self.loading.environment()}
        )

    def _write_key(self) -> str:
        """Write the key to a file that only we can read: other users see the flags of a process."""
        path = Path(self._folder.name) / "key.yaml"
        path.write_bytes(msgspec.json.encode({"api-key": self.http.key}))
        return str(path)

    async def is_ready(self) -> bool:
        """Return whether it answers. While it is paused it reports itself unready, although it is healthy."""
        for path in ("/ready", "/health"):
            try:
                await self.http.get(path, timeout_s=_REQUEST_S, text=True)
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
            installing.check_served(self._config.model, str(model.get("model_path", "")))
        files = facts_of(self._config.model)
        return Facts(files.name, slots, kv_tokens, context, files.vocab or 0, files.end_ids, label)

    def stream(self, request: str, asked: ServerRequest) -> AbstractAsyncContextManager[EventStream[AnswerPart]]:
        body = {"rid": request, "input_ids": asked.tokens, "stream": True, "return_logprob": True}
        body["sampling_params"] = _sampling(asked)
        return stream(self.http, "/generate", body, _parts)

    async def abort(self, request: str) -> None:
        await self.http.post("/abort_request", {"rid": request}, timeout_s=_REQUEST_S)

    async def load(self) -> ServerLoad:
        gauges = read_gauges(await self.http.get("/metrics", timeout_s=_REQUEST_S, text=True), "sglang:")
        return ServerLoad(
            num_running=int(sum(gauges.get("num_running_reqs", ()))),
            num_waiting=int(sum(gauges.get("num_queue_reqs", ()))),
            kv_used=max(gauges.get("token_usage", ()), default=0.0),
            num_preemptions=int(sum(gauges.get("num_retracted_reqs", ()))),
        )


def _sampling(asked: ServerRequest) -> dict[str, Any]:
    """Translate the sampling settings. `ignore_eos` has the server ignore stop ids too; they are then looked for on our
    side."""
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


def _parts(data: bytes) -> tuple[AnswerPart]:
    event = _decode(data)
    if event.error is not None:
        said = event.error.get("message", event.error)
        if event.error.get("code") == 400:  # it refuses within a stream that it has begun already
            raise JobRefused(str(said))
        raise EngineError(f"the server failed: {said}")
    return (_part(event),)


def _part(event: _Event) -> AnswerPart:
    meta = event.meta_info
    finish = meta.finish_reason
    if finish is not None and finish.type == "abort":
        if finish.status_code == 400:
            raise JobRefused(finish.message)
        return AnswerPart((), (), "aborted")  # its last token may come a second time
    logprobs = [number(one[0]) for one in meta.output_token_logprobs]
    if finish is None:
        return AnswerPart(event.output_ids, logprobs)
    if finish.type not in _ENDS:
        raise EngineError(f"the server ended an answer with {finish.type!r}")
    spans = meta.weight_versions or ()
    return AnswerPart(event.output_ids, logprobs, _ENDS[finish.type], spans)


_ANSWER_S = 60.0
_LOADER = "polyrl.engines.served.inside.sglang_load"
_NO_TENSORS = base64.b64encode(pickle.dumps([])).decode()


def _speculation(config: ServedConfig) -> list[str]:
    """Drafts are single lines, not trees: these need pages of one token or FlashInfer. Its thresholds stay at 1, where
    it accepts as often as the target model draws. Raises EngineError."""
    if config.speculation == "off":
        return []
    if config.speculation == "suffix":
        raise EngineError("speculation: SGLang has no suffix drafts; expected off or ngram")
    if config.is_on_cpu:
        raise EngineError("speculation: SGLang's was not tested on the CPU; expected off, or a GPU")
    num = str(config.draft_tokens + 1)  # with the token before the draft
    return ["--speculative-algorithm", "NGRAM", "--speculative-num-draft-tokens", num,
            "--speculative-ngram-max-bfs-breadth", "1"]  # fmt: skip


class SglangWeightLoading:
    """How SGLang takes weights, through its public hooks only; docs/guides/engine-versions.md lists them.

    /update_weights_from_tensor calls a loader that the server was started with, which fetches a version out of our
    memory and gives it to the model's own `load_weights`. The request carries no tensors, and nothing but an empty list
    a rank is unpickled. /pause_generation with mode=retract throws the cache of running samples away, to be computed
    anew; in_place keeps it.
    """

    def __init__(self, http: Http, config: ServedConfig) -> None:
        self._http = http
        self._config = config
        self._modules = OurModules()
        self._socket_name = os.environ.get(SOCKET_VARIABLE, "") or new_name()
        self._num_ranks: int | None = None

    def flags(self) -> list[str]:
        flags = ["--custom-weight-loader", _LOADER]
        # A cache of prompts cannot be emptied while samples run: one shared by all would stay at the first version.
        return flags if self._config.after_install == "recompute" else [*flags, "--disable-radix-cache"]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": self._modules.path, SOCKET_VARIABLE: self._socket_name}

    async def stage(self, weights: Weights) -> StagedVersion:
        if self._num_ranks is None:
            said: dict[str, Any] = await self._http.get("/server_info", timeout_s=_ANSWER_S)
            self._num_ranks = int(said.get("tp_size", 1))
        return await stage(weights, self._config.model)

    async def pause(self) -> None:
        mode = "retract" if self._config.after_install == "recompute" else "in_place"
        await self._http.post("/pause_generation", {"mode": mode}, timeout_s=_ANSWER_S)

    async def put(self, staged: StagedVersion) -> None:
        await self._http.post("/begin_weight_update", {}, timeout_s=_ANSWER_S)
        try:
            await hand_over(staged, self._socket_name, self._update())
        finally:
            await self._end()
        label = {"new_version": str(staged.version), "abort_all_requests": False}
        await labelled(self._http.post("/update_weight_version", label, timeout_s=_ANSWER_S))

    async def _update(self) -> None:
        body = {
            "serialized_named_tensors": [_NO_TENSORS] * (self._num_ranks or 1),
            "load_format": _LOADER,
            "flush_cache": self._config.after_install == "recompute",
        }
        await self._http.post("/update_weights_from_tensor", body, timeout_s=PUT_S)

    async def _end(self) -> None:
        try:
            await self._http.post("/end_weight_update", {}, timeout_s=_ANSWER_S)
        except EngineError as error:
            raise ServerBroken(f"an update of weights could not be ended: {error}") from error

    async def resume(self) -> None:
        await self._http.post("/continue_generation", {}, timeout_s=_ANSWER_S)

    async def is_paused(self) -> bool:
        """Return whether the server pauses: it is up, and not ready for requests."""
        try:
            await self._http.get("/ready", timeout_s=_ANSWER_S, text=True)
        except ServerAnswered:
            return True
        return False
