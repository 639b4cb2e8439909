"""A vLLM server: how it is started, what it says, how it streams. Its version is in `versions`.

It takes token ids and gives token ids (`/inference/v1/generate`), and loads no tokenizer. The log-probability of a
token is that under the sampling temperature before truncation: our extension sees to it (`inside`). Greedy: that
at temperature 1. A server whose extension is not of this PolyRL reports those after truncation, and is given no samples
that are truncated. Nor is one that verifies drafts, whose accepted tokens do not pass through the sampler that our
extension sees.
"""

import logging
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from polyrl.engines.engine import EngineError, Weights
from polyrl.engines.served import installing
from polyrl.engines.served.between import KEY_VARIABLE
from polyrl.engines.served.http import EventStream, Http, ServerAnswered, ServerUnreachable, read_gauges
from polyrl.engines.served.installing import PUT_S, OurModules, StagedVersion, hand_over, labelled, new_name, stage
from polyrl.engines.served.server import (
    AnswerPart,
    Facts,
    LabelSpan,
    LaunchCommand,
    ServedConfig,
    ServedEnd,
    ServerLoad,
    ServerRequest,
    WeightLoading,
    facts_of,
    number,
    stream,
)

log = logging.getLogger("polyrl.engines.served")

_REQUEST_S = 10.0
_FACTS_S = 120.0
"""How long facts are waited for: the server has just started, and others on the machine may have too."""
_CPU_BLOCK_TOKENS = 128
_GPU_BLOCK_TOKENS = 16
_OWN_BLOCKS = 1
"""Blocks that it keeps to itself: a context as large as the cache must fit beside them."""
_FLOAT32_BYTES = 4
_LOOKUP_TOKENS = (2, 5)
"""The fewest and the most tokens that must have occurred before, for what followed them to be a draft."""
_ENDS: dict[str, ServedEnd] = {"stop": "stop", "length": "length", "abort": "aborted"}


class _Logprob(Struct):
    logprob: float | None


class _Logprobs(Struct):
    content: list[_Logprob] = []


class _Choice(Struct):
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[LabelSpan] | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class VllmServer:
    def __init__(self, http: Http, config: ServedConfig) -> None:
        self.http = http
        self.tells_policy = False
        self.loading: WeightLoading = VllmWeightLoading(http, config)
        self._config = config

    def command(self, port: int) -> LaunchCommand:
        config = self._config
        model = facts_of(config.model)
        flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "polyrl"]
        flags += ["--enable-scale-out", "--skip-tokenizer-init", "--generation-config", "vllm"]
        flags += ["--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
        flags += ["--middleware", "polyrl.engines.served.inside.Guard"]
        environment = {
            KEY_VARIABLE: self.http.key,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        context = config.max_context
        if config.is_on_cpu:
            context = config.cpu_context(model.max_context)
            kv_tokens = _num_blocks(config.cpu_kv_tokens, _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
            flags += ["--dtype", "float32", "--enforce-eager"]
            flags += ["--kv-cache-memory-bytes", str(kv_tokens * model.kv_numbers * _FLOAT32_BYTES)]
            environment |= _cpu_environment(config)
        elif config.kv_tokens is not None:
            num_blocks = _num_blocks(config.kv_tokens, _GPU_BLOCK_TOKENS)
            flags += ["--block-size", str(_GPU_BLOCK_TOKENS), "--num-gpu-blocks-override", str(num_blocks)]
        if context is not None:
            flags += ["--max-model-len", str(context)]
        slots = config.num_slots
        if slots is not None:
            flags += ["--max-num-seqs", str(slots)]
        if config.speculation != "off":
            flags += ["--speculative-config", msgspec.json.encode(_speculation(config)).decode()]
        argv = [config.interpreter, "-m", "vllm.entrypoints.cli.main", "serve", config.model]
        return LaunchCommand(
            [*argv, *flags, *self.loading.flags(), *config.flags], {**environment, **self.loading.environment()}
        )

    async def is_ready(self) -> bool:
        try:
            await self.http.get("/health", timeout_s=_REQUEST_S, text=True)
        except (ServerAnswered, ServerUnreachable):
            return False
        return True

    async def facts(self) -> Facts:
        try:
            said = (await self.http.get("/server_info?config_format=json", timeout_s=_FACTS_S))["vllm_config"]
            model, cache, batch = said["model_config"], said["cache_config"], said["scheduler_config"]
            slots, context = int(batch["max_num_seqs"]), int(model["max_model_len"])
            kv_tokens = int(cache.get("kv_cache_size_tokens") or 0)
            label = str((await self.http.get("/weight_info", timeout_s=_FACTS_S))["weight_version"])
        except ServerAnswered as error:
            raise EngineError(f"{error}; a vLLM server needs VLLM_SERVER_DEV_MODE=1 and --enable-scale-out") from error
        except (KeyError, TypeError, ValueError) as error:
            raise EngineError(f"/server_info says something else than expected: {error!r}") from error
        if self._config.url:
            installing.check_served(self._config.model, str(model.get("model", "")))
        self.tells_policy = await self._tell_policy() and not said.get("speculative_config")
        files = facts_of(self._config.model)
        return Facts(files.name, slots, kv_tokens, context, files.vocab or 0, files.end_ids, label)

    async def _tell_policy(self) -> bool:
        """Have all ranks report log-probabilities before truncation; whether they do."""
        body = {"method": "polyrl_tell_policy", "timeout": _FACTS_S}
        try:
            await self.http.post("/collective_rpc", body, timeout_s=_FACTS_S)
        except ServerAnswered as error:
            log.warning("the server takes no samples with top-p, top-k or min-p: %s", error)
            return False
        return True

    def stream(self, request: str, asked: ServerRequest) -> AbstractAsyncContextManager[EventStream[AnswerPart]]:
        body = {"request_id": request, "token_ids": asked.tokens, "stream": True, "sampling_params": _sampling(asked)}
        return stream(self.http, "/inference/v1/generate", body, _parts)

    async def abort(self, request: str) -> None:
        body = {"request_ids": [f"generate-tokens-{request}"]}
        await self.http.post("/abort_requests", body, timeout_s=_REQUEST_S)

    async def load(self) -> ServerLoad:
        gauges = read_gauges(await self.http.get("/metrics", timeout_s=_REQUEST_S, text=True), "vllm:")
        return ServerLoad(
            num_running=int(sum(gauges.get("num_requests_running", ()))),
            num_waiting=int(sum(gauges.get("num_requests_waiting", ()))),
            kv_used=max(gauges.get("kv_cache_usage_perc", ()), default=0.0),
            num_preemptions=int(sum(gauges.get("num_preemptions_total", ()))),
        )


def _speculation(config: ServedConfig) -> dict[str, Any]:
    """Raises EngineError on the CPU, where vLLM 0.32 started with drafts and wrote no token."""
    if config.is_on_cpu:
        raise EngineError("speculation: vLLM wrote no token with it on the CPU; expected off, or a GPU")
    if config.speculation == "suffix":
        return {"method": "suffix", "num_speculative_tokens": config.draft_tokens}
    lookup = {"prompt_lookup_min": _LOOKUP_TOKENS[0], "prompt_lookup_max": _LOOKUP_TOKENS[1]}
    return {"method": "ngram", "num_speculative_tokens": config.draft_tokens, **lookup}


def _num_blocks(kv_tokens: int, block_tokens: int) -> int:
    return -(-kv_tokens // block_tokens) + _OWN_BLOCKS


def _cpu_environment(config: ServedConfig) -> dict[str, str]:
    """Threads that are not bound: `auto` binds those of every server on the machine to the same cores."""
    threads = {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    openmp = Path(config.interpreter).parent.parent / "lib" / "libiomp5.so"
    return threads | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def _sampling(asked: ServerRequest) -> dict[str, Any]:
    sampling = asked.sampling
    return {
        "max_tokens": asked.max_new,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "top_k": sampling.top_k,
        "min_p": sampling.min_p,
        "seed": asked.seed,
        "logprobs": 0,
        "ignore_eos": True,  # the end of text is among the ids that end it, where it does
        "stop_token_ids": asked.end_ids,
        "detokenize": False,
    }


def _parts(data: bytes) -> list[AnswerPart]:
    event = _decode(data)
    if event.error is not None:
        raise EngineError(f"the server failed: {event.error.get('message', event.error)}")
    return [_part(choice) for choice in event.choices]


def _part(choice: _Choice) -> AnswerPart:
    logprobs = [] if choice.logprobs is None else [number(one.logprob) for one in choice.logprobs.content]
    if choice.finish_reason is None:
        return AnswerPart(choice.token_ids, logprobs)
    if choice.finish_reason not in _ENDS:
        raise EngineError(f"the server ended an answer with {choice.finish_reason!r}")
    spans = choice.weight_versions or ()
    return AnswerPart(choice.token_ids, logprobs, _ENDS[choice.finish_reason], spans)


_ANSWER_S = 60.0
_METHOD = "polyrl_install"


class VllmWeightLoading:
    """How vLLM takes weights, through its public hooks only; docs/guides/engine-versions.md lists them.

    Its workers are extended by a method that fetches a version out of our memory and gives it to `reload_weights`,
    which is vLLM's own way to put weights in place, on every device and at every rank. /pause with mode=keep freezes
    running samples; with clear_cache=true their cache is computed anew afterwards.
    """

    def __init__(self, http: Http, config: ServedConfig) -> None:
        self._http = http
        self._config = config
        self._modules = OurModules()

    def flags(self) -> list[str]:
        flags = ["--worker-extension-cls", "polyrl.engines.served.inside.PolyrlExtension"]
        # A cache of prompts cannot be emptied while samples run: one shared by all would stay at the first version.
        return flags if self._config.after_install == "recompute" else [*flags, "--no-enable-prefix-caching"]

    def environment(self) -> Mapping[str, str]:
        return {"PYTHONPATH": self._modules.path, "VLLM_SERVER_DEV_MODE": "1"}

    async def stage(self, weights: Weights) -> StagedVersion:
        return await stage(weights, self._config.model)

    async def pause(self) -> None:
        clear = "true" if self._config.after_install == "recompute" else "false"
        await self._http.post(f"/pause?mode=keep&clear_cache={clear}", timeout_s=_ANSWER_S)

    async def put(self, staged: StagedVersion) -> None:
        name = new_name()
        body = {"method": _METHOD, "args": [name], "timeout": PUT_S}
        await hand_over(staged, name, self._http.post("/collective_rpc", body, timeout_s=PUT_S))
        label = {"new_version": str(staged.version)}
        await labelled(self._http.post("/update_weight_version", label, timeout_s=_ANSWER_S))

    async def resume(self) -> None:
        await self._http.post("/resume", timeout_s=_ANSWER_S)

    async def is_paused(self) -> bool:
        said: dict[str, Any] = await self._http.get("/is_paused", timeout_s=_ANSWER_S)
        return bool(said["is_paused"])
