"""A vLLM server: how it is started, what it says, how it streams. Its version is in `versions`.

It takes token ids and gives token ids (`/inference/v1/generate`), and loads no tokenizer. The log-probability of a
token is that under the sampling temperature before truncation: our extension sees to it (`vllm_sampling`). Greedy: that
at temperature 1. A server whose extension is not of this PolyRL reports those after truncation, and is given no samples
that are truncated.
"""

import logging
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import msgspec
from msgspec import Struct

from polyrl.engines.engine import EngineError
from polyrl.engines.served import checking, machine, model_files
from polyrl.engines.served.between import KEY_VARIABLE
from polyrl.engines.served.http import Events, Http, ServerAnswered, ServerUnreachable
from polyrl.engines.served.metrics import read_gauges
from polyrl.engines.served.server import (
    Asked,
    Command,
    End,
    Facts,
    Load,
    Part,
    ServedConfig,
    Span,
    Weighing,
    number,
    stream,
)
from polyrl.engines.served.vllm_weights import VllmWeighing

log = logging.getLogger("polyrl.engines.served")

_ASK_S = 10.0
_FACTS_S = 120.0
"""It has just started, and so may have others on the same machine."""
_CPU_BLOCK_TOKENS = 128
_GPU_BLOCK_TOKENS = 16
_OWN_BLOCKS = 1
"""That it keeps to itself: a context as large as the cache must fit beside it."""
_FLOAT32_BYTES = 4
_ENDS: dict[str, End] = {"stop": "stop", "length": "length", "abort": "aborted"}


class _Logprob(Struct):
    logprob: float | None


class _Logprobs(Struct):
    content: list[_Logprob] = []


class _Choice(Struct):
    token_ids: list[int] = []
    logprobs: _Logprobs | None = None
    finish_reason: str | None = None
    weight_versions: list[Span] | None = None


class _Event(Struct):
    choices: list[_Choice] = []
    error: dict[str, Any] | None = None


_decode = msgspec.json.Decoder(_Event).decode


class VllmServer:
    def __init__(self, http: Http, config: ServedConfig) -> None:
        self.http = http
        self.tells_policy = False
        self.weighing: Weighing = VllmWeighing(http, config)
        self._config = config

    def command(self, port: int) -> Command:
        config = self._config
        model = model_files.read(config.model)
        flags = ["--host", "127.0.0.1", "--port", str(port), "--served-model-name", "polyrl"]
        flags += ["--enable-scale-out", "--skip-tokenizer-init", "--generation-config", "vllm"]
        flags += ["--logprobs-mode", "processed_logprobs", "--disable-uvicorn-access-log"]
        flags += ["--middleware", "polyrl.engines.served.vllm_guard.Guard"]
        environment = {
            KEY_VARIABLE: self.http.key,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_SERVER_DEV_MODE": "1",
        }
        context = config.max_context
        if machine.is_cpu(config):
            context = machine.cpu_context(config, model.max_context)
            kv_tokens = _num_blocks(machine.cpu_kv_tokens(config), _CPU_BLOCK_TOKENS) * _CPU_BLOCK_TOKENS
            flags += ["--dtype", "float32", "--enforce-eager"]
            flags += ["--kv-cache-memory-bytes", str(kv_tokens * model.kv_numbers * _FLOAT32_BYTES)]
            environment |= _cpu_environment(config)
        elif config.kv_tokens is not None:
            num_blocks = _num_blocks(config.kv_tokens, _GPU_BLOCK_TOKENS)
            flags += ["--block-size", str(_GPU_BLOCK_TOKENS), "--num-gpu-blocks-override", str(num_blocks)]
        if context is not None:
            flags += ["--max-model-len", str(context)]
        slots = machine.slots(config)
        if slots is not None:
            flags += ["--max-num-seqs", str(slots)]
        argv = [machine.python_of(config), "-m", "vllm.entrypoints.cli.main", "serve", config.model]
        return Command(
            [*argv, *flags, *self.weighing.flags(), *config.flags], {**environment, **self.weighing.environment()}
        )

    async def is_ready(self) -> bool:
        try:
            await self.http.get("/health", timeout_s=_ASK_S, text=True)
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
            checking.check_served(self._config.model, str(model.get("model", "")))
        self.tells_policy = await self._tell_policy()
        files = model_files.read(self._config.model)
        return Facts(files.name, slots, kv_tokens, context, files.vocab, files.end_ids, label)

    async def _tell_policy(self) -> bool:
        """Have all ranks report log-probabilities before truncation; whether they do."""
        body = {"method": "polyrl_tell_policy", "timeout": _FACTS_S}
        try:
            await self.http.post("/collective_rpc", body, timeout_s=_FACTS_S)
        except ServerAnswered as error:
            log.warning("the server takes no samples with top-p, top-k or min-p: %s", error)
            return False
        return True

    def stream(self, request: str, asked: Asked) -> AbstractAsyncContextManager[Events[Part]]:
        body = {"request_id": request, "token_ids": asked.tokens, "stream": True, "sampling_params": _sampling(asked)}
        return stream(self.http, "/inference/v1/generate", body, _parts)

    async def abort(self, request: str) -> None:
        body = {"request_ids": [f"generate-tokens-{request}"]}
        await self.http.post("/abort_requests", body, timeout_s=_ASK_S)

    async def load(self) -> Load:
        gauges = read_gauges(await self.http.get("/metrics", timeout_s=_ASK_S, text=True), "vllm:")
        return Load(
            num_running=int(sum(gauges.get("num_requests_running", ()))),
            num_waiting=int(sum(gauges.get("num_requests_waiting", ()))),
            kv_used=max(gauges.get("kv_cache_usage_perc", ()), default=0.0),
            num_preemptions=int(sum(gauges.get("num_preemptions_total", ()))),
        )


def _num_blocks(kv_tokens: int, block_tokens: int) -> int:
    return -(-kv_tokens // block_tokens) + _OWN_BLOCKS


def _cpu_environment(config: ServedConfig) -> dict[str, str]:
    """Threads that are not bound: `auto` binds those of every server on the machine to the same cores."""
    threads = {"OMP_NUM_THREADS": str(config.threads), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    openmp = Path(machine.python_of(config)).parent.parent / "lib" / "libiomp5.so"
    return threads | ({"LD_PRELOAD": str(openmp)} if openmp.exists() else {})


def _sampling(asked: Asked) -> dict[str, Any]:
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


def _parts(data: bytes) -> list[Part]:
    event = _decode(data)
    if event.error is not None:
        raise EngineError(f"the server failed: {event.error.get('message', event.error)}")
    return [_part(choice) for choice in event.choices]


def _part(choice: _Choice) -> Part:
    logprobs = [] if choice.logprobs is None else [number(one.logprob) for one in choice.logprobs.content]
    if choice.finish_reason is None:
        return Part(choice.token_ids, logprobs)
    if choice.finish_reason not in _ENDS:
        raise EngineError(f"the server ended an answer with {choice.finish_reason!r}")
    spans = choice.weight_versions or ()
    return Part(choice.token_ids, logprobs, _ENDS[choice.finish_reason], spans)
