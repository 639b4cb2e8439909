"""A stand-in for the vLLM server: its interface as far as PolyRL uses it, and no model. Starts within a second.

    python -m vllm.entrypoints.cli.main serve DIR --port P [--tokens-per-s N] [--die-when-asked] [--older-extension]

What it writes is a function of the tokens before it, so that an answer that moves goes on as it would have. The
contract suite that holds the real server holds this one too.
"""

import argparse
import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

from aiohttp import web
from aiohttp.typedefs import Handler


def next_token(tokens: list[int], vocab: int) -> int:
    return (31 * tokens[-1] + 17 * len(tokens) + 7) % vocab


def install(name: str) -> None:
    """Take a version as the real server does, and throw it away."""
    import torch

    from polyrl.engines.served.inside import Rank, take

    def load(tensors: Iterable[object]) -> None:
        for _ in tensors:
            pass

    take(name, Rank(0, 1, 0, 1), torch.nn.Module(), load)


@web.middleware
async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
    """As `inside.Guard` has it, which the real server is given by a flag. Some tests start one without a key."""
    key = os.environ.get("POLYRL_ENGINE_KEY")
    if key and request.headers.get("Authorization") != f"Bearer {key}":
        return web.Response(status=401)
    return await handler(request)


class Server:
    def __init__(self, args: argparse.Namespace) -> None:
        self.args = args
        self.vocab = json.loads((Path(args.model) / "config.json").read_text())["vocab_size"]
        self.slots = asyncio.Semaphore(args.max_num_seqs)
        self.num_running = self.num_waiting = 0
        self.goes_on = asyncio.Event()
        self.goes_on.set()
        self.label = "default"
        self.writing: dict[str, asyncio.Task[None]] = {}

    def routes(self) -> list[web.RouteDef]:
        return [
            web.get("/health", self.health),
            web.get("/server_info", self.server_info),
            web.get("/weight_info", self.weight_info),
            web.get("/metrics", self.metrics),
            web.post("/abort_requests", self.abort),
            web.post("/pause", self.pause),
            web.post("/resume", self.resume),
            web.get("/is_paused", self.is_paused),
            web.post("/update_weight_version", self.update_label),
            web.post("/inference/v1/generate", self.generate),
            web.post("/collective_rpc", self.call),
        ]

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def server_info(self, _: web.Request) -> web.Response:
        model = {"model": self.args.model, "max_model_len": self.args.max_model_len}
        cache, batch = {"kv_cache_size_tokens": 65_536}, {"max_num_seqs": self.args.max_num_seqs}
        said = {"model_config": model, "cache_config": cache, "scheduler_config": batch}
        said["speculative_config"] = self.args.speculative_config and json.loads(self.args.speculative_config)
        return web.json_response({"vllm_config": said})

    async def weight_info(self, _: web.Request) -> web.Response:
        return web.json_response({"weight_version": self.label})

    async def pause(self, _: web.Request) -> web.Response:
        self.goes_on.clear()
        return web.json_response({"status": "paused"})

    async def resume(self, _: web.Request) -> web.Response:
        self.goes_on.set()
        return web.json_response({"status": "resumed"})

    async def is_paused(self, _: web.Request) -> web.Response:
        return web.json_response({"is_paused": not self.goes_on.is_set()})

    async def update_label(self, request: web.Request) -> web.Response:
        self.label = (await request.json())["new_version"]
        return web.json_response({"success": True, "new_version": self.label})

    async def call(self, request: web.Request) -> web.Response:
        """A method of the extension, in every rank."""
        asked = await request.json()
        if asked["method"] == "polyrl_install":
            await asyncio.to_thread(install, *asked["args"])
            return web.json_response({"results": [None]})
        if asked["method"] != "polyrl_tell_policy" or self.args.older_extension:
            return web.json_response({"error": {"message": "no such method", "code": 500}}, status=500)
        return web.json_response({"results": [None]})

    async def metrics(self, _: web.Request) -> web.Response:
        figures = {"num_requests_running": self.num_running, "num_requests_waiting": self.num_waiting}
        lines = [f'vllm:{name}{{engine="0"}} {value}.0' for name, value in figures.items()]
        return web.Response(text="\n".join(["# HELP vllm:num_requests_running x", *lines]) + "\n")

    async def abort(self, request: web.Request) -> web.Response:
        """Their streams end at once, also those of samples that wait and while it is paused."""
        names = set((await request.json())["request_ids"]) & self.writing.keys()
        for name in names:
            self.writing[name].cancel()
        return web.json_response({"status": "aborted", "aborted": len(names)})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        if self.args.die_when_asked:
            print("RuntimeError: told to die", file=sys.stderr, flush=True)
            os._exit(3)
        asked = await request.json()
        name, tokens, sampling = f"generate-tokens-{asked['request_id']}", asked["token_ids"], asked["sampling_params"]
        if len(tokens) + sampling["max_tokens"] > self.args.max_model_len:
            return web.json_response({"error": {"message": "too long", "code": 400}}, status=400)
        if not 0 <= min(tokens) <= max(tokens) < self.vocab:
            os.kill(os.getpid(), signal.SIGKILL)  # as the real one does, without a tokenizer
        reply = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await reply.prepare(request)
        writing = self.writing[name] = asyncio.create_task(self.write_in_turn(reply, tokens, sampling))
        try:
            (failed,) = await asyncio.gather(writing, return_exceptions=True)
        finally:
            del self.writing[name]
        if isinstance(failed, asyncio.CancelledError):
            await self.event(reply, [], "abort", [])
        elif failed is not None:  # whoever listened is gone
            raise failed
        await reply.write(b"data: [DONE]\n\n")
        return reply

    async def write_in_turn(self, reply: web.StreamResponse, tokens: list[int], sampling: dict) -> None:
        self.num_waiting += 1
        try:
            async with self.slots:
                self.num_waiting, self.num_running = self.num_waiting - 1, self.num_running + 1
                try:
                    await self.write(reply, tokens, sampling)
                finally:
                    self.num_running, self.num_waiting = self.num_running - 1, self.num_waiting + 1
        finally:
            self.num_waiting -= 1

    async def write(self, reply: web.StreamResponse, tokens: list[int], sampling: dict) -> None:
        made: list[int] = []
        labels: list[str] = []
        while True:
            await asyncio.sleep(1.0 / self.args.tokens_per_s)
            await self.goes_on.wait()
            token = next_token([*tokens, *made], self.vocab)
            made.append(token)
            labels.append(self.label)
            ends = "stop" if token in sampling["stop_token_ids"] else None
            ends = "length" if ends is None and len(made) == sampling["max_tokens"] else ends
            await self.event(reply, [token], ends, labels)
            if ends is not None:
                return

    async def event(self, reply: web.StreamResponse, tokens: list[int], end: str | None, labels: list[str]) -> None:
        content = [{"token_id": token, "logprob": -1.5, "rank": 1, "top_logprobs": []} for token in tokens]
        spans = [{"version": one, "start": at, "end": at + 1} for at, one in enumerate(labels)] if end else None
        choice = {"index": 0, "finish_reason": end, "token_ids": tokens, "weight_versions": spans}
        choice["logprobs"] = {"content": content}
        await reply.write(b"data: " + json.dumps({"choices": [choice]}).encode() + b"\n\n")


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("serve")
    parser.add_argument("model")
    parser.add_argument("--port", type=int)
    parser.add_argument("--max-model-len", type=int, default=4096)
    parser.add_argument("--max-num-seqs", type=int, default=8)
    parser.add_argument("--tokens-per-s", type=float, default=300.0)
    parser.add_argument("--die-when-asked", action="store_true")
    parser.add_argument("--older-extension", action="store_true")
    parser.add_argument("--speculative-config")
    args, _ = parser.parse_known_args()
    if args.tokens_per_s == 0:
        sys.exit("ValueError: it cannot start")

    subprocess.Popen(["sleep", "600"])  # as the real one, it is several processes

    async def serve() -> None:
        server = web.Application(middlewares=[guard])
        server.add_routes(Server(args).routes())
        runner = web.AppRunner(server, access_log=None)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", args.port).start()
        print("it listens", flush=True)
        await asyncio.Event().wait()

    asyncio.run(serve())


if __name__ == "__main__":
    main()
