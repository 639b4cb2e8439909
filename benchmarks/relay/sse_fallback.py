"""sse_worker.c and sse_client.c again, for a machine without a compiler: the same arguments, the same lines on stdout.

    sse_fallback.py worker NUM_ENGINES STEP_US [RECEIVED]
    sse_fallback.py client NUM_SAMPLES SECONDS MAX_TOKENS RECEIVED PORT...

It costs several times as much a token, so a saturated relay may wait for it. Unlike the reader in C it does not undo
chunks: an event that a relay cuts inside its time stamp is not counted.
"""

import asyncio
import json
import mmap
import re
import sys
import time
from pathlib import Path

START_S = 60.0
MAX_STARTING = 128
EVENT = (
    b'data: {"text":" token","output_ids":[123456],"meta_info":{"id":"5f0c3a9e7b1d4c28a6e9d0f1b2c3d4e5",'
    b'"finish_reason":null,"prompt_tokens":64,"weight_version":"default","output_token_logprobs":'
    b'[[-0.6931471805599453,123456,null]],"completion_tokens":%8d,"cached_tokens":0,"e2e_latency":0.5312451873,'
    b'"sent_ns":%20d}}\n\n'
)
CHUNK = b"%x\r\n%s\r\n" % (len(EVENT % (0, 0)), EVENT)
LAST = b"e\r\ndata: [DONE]\n\n\r\n0\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
ABOUT = b'{"status":"ok","served_model_name":"fake","is_generation":true,"object":"list","data":[{"id":"fake"}]}'
ASK = b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s"
SENT = re.compile(rb'"sent_ns": *(\d+)}')


def open_received(path: str) -> memoryview:
    """The one number that reader and engines share."""
    with Path(path).open("r+b") as file:
        return memoryview(mmap.mmap(file.fileno(), 8)).cast("q")


class Sample(asyncio.Protocol):
    """A connection to an engine: requests in, one event a step out."""

    def __init__(self, engine: "set[Sample]") -> None:
        self.engine = engine
        self.request = b""
        self.num_tokens = self.max_tokens = 0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport

    def connection_lost(self, exc: Exception | None) -> None:
        self.engine.discard(self)

    def data_received(self, data: bytes) -> None:
        self.request += data
        head, blank, body = self.request.partition(b"\r\n\r\n")
        length = re.search(rb"content-length: *(\d+)", head, re.IGNORECASE)
        if not blank or len(body) < int(length[1] if length else 0):
            return
        self.request = b""
        wanted = re.search(rb'"max_new_tokens": *(\d+)', body)
        if wanted is None:
            self.transport.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(ABOUT), ABOUT))
            return
        self.num_tokens, self.max_tokens = 0, int(wanted[1])
        self.transport.write(HEAD)
        self.engine.add(self)

    def send_token(self) -> None:
        if self.transport.get_write_buffer_size():
            return
        self.num_tokens += 1
        event = CHUNK % (self.num_tokens, time.monotonic_ns())
        if self.num_tokens == self.max_tokens:
            self.engine.discard(self)
            event += LAST
        self.transport.write(event)


async def work(num_engines: int, step_s: float, received: memoryview | None) -> None:
    engines: list[set[Sample]] = [set() for _ in range(num_engines)]
    loop, num_sent = asyncio.get_running_loop(), 0

    async def run(number: int) -> None:
        nonlocal num_sent
        due = loop.time() + step_s * number / num_engines
        while True:
            await asyncio.sleep(due - loop.time())
            due = max(due + step_s, loop.time() - 4 * step_s)
            while received and num_sent - received[0] >= sum(map(len, engines)) > 0:
                await asyncio.sleep(5e-5)
            num_sent += len(engines[number])
            for sample in list(engines[number]):
                sample.send_token()

    servers = [await loop.create_server(lambda one=one: Sample(one), "127.0.0.1", backlog=4096) for one in engines]
    print(json.dumps({"ports": [server.sockets[0].getsockname()[1] for server in servers]}), flush=True)
    await asyncio.gather(*map(run, range(num_engines)))


class Reader:
    """What all streams together have seen."""

    def __init__(self, received: memoryview) -> None:
        self.received = received
        self.num_flowing = self.num_reads = 0
        self.latencies_ns: list[int] | None = None
        """None while it is not counted."""
        self.failed = asyncio.get_running_loop().create_future()

    def fail(self, why: str) -> None:
        if not self.failed.done():
            self.failed.set_exception(ConnectionError(why))


class Stream(asyncio.Protocol):
    def __init__(self, reader: Reader, first_tokens: int, max_tokens: int) -> None:
        self.reader, self.first_tokens, self.max_tokens = reader, first_tokens, max_tokens
        self.is_flowing = False
        self.rest = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.ask(self.first_tokens)

    def connection_lost(self, exc: Exception | None) -> None:
        self.reader.fail(f"a stream broke: {exc}")

    def ask(self, num_tokens: int) -> None:
        sampling = {"temperature": 1.0, "max_new_tokens": num_tokens}
        asked = {"input_ids": list(range(64)), "sampling_params": sampling, "stream": True, "return_logprob": True}
        body = json.dumps(asked, separators=(",", ":")).encode()
        self.transport.write(ASK % (len(body), body))

    def data_received(self, data: bytes) -> None:
        now, reader = time.monotonic_ns(), self.reader
        if data.startswith(b"HTTP/") and data[8:12] != b" 200":
            reader.fail(f"the answer is not 200: {data[:60]}")
        data = self.rest + data
        at = 0
        for found in SENT.finditer(data):
            at = found.end()
            reader.received[0] += 1
            if reader.latencies_ns is not None:
                reader.latencies_ns.append(now - int(found[1]))
            if not self.is_flowing:
                self.is_flowing = True
                reader.num_flowing += 1
        self.rest = data[max(at, len(data) - 400) :]
        reader.num_reads += reader.latencies_ns is not None
        if data.endswith(b"\r\n0\r\n\r\n"):
            self.rest = b""
            self.ask(self.max_tokens)


async def read(num_samples: int, seconds: float, max_tokens: int, received: memoryview, ports: list[int]) -> None:
    loop, reader = asyncio.get_running_loop(), Reader(received)
    async with asyncio.timeout(START_S):
        for number in range(num_samples):
            first = 1 + number * 2654435761 % max_tokens
            await loop.create_connection(
                lambda first=first: Stream(reader, first, max_tokens), "127.0.0.1", ports[number % len(ports)]
            )
            while number - reader.num_flowing >= MAX_STARTING:
                await asyncio.sleep(1e-3)
        while reader.num_flowing < num_samples:
            await asyncio.sleep(1e-3)
    await asyncio.sleep(0.5)
    print("started", flush=True)
    latencies = reader.latencies_ns = []
    start = time.monotonic()
    await asyncio.wait([reader.failed], timeout=seconds)
    elapsed, reader.latencies_ns = time.monotonic() - start, None
    if reader.failed.done():
        reader.failed.result()
    ranked = sorted(latencies) or [0]
    p50, p99 = (round(ranked[int(q * (len(ranked) - 1))] / 1e6, 3) for q in (0.5, 0.99))
    said = {"tokens": len(latencies), "seconds": elapsed, "reads": reader.num_reads}
    print(json.dumps({**said, "latency_ms": {"p50": p50, "p99": p99}}), flush=True)


def main(role: str, args: list[str]) -> None:
    if role == "worker":
        num_engines, step_us, *paths = args
        asyncio.run(work(int(num_engines), int(step_us) / 1e6, open_received(paths[0]) if paths else None))
    else:
        num_samples, seconds, max_tokens, path, *ports = args
        asyncio.run(read(int(num_samples), float(seconds), int(max_tokens), open_received(path), [*map(int, ports)]))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
