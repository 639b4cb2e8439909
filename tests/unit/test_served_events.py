"""Events of a server's stream: read all at once, however they were cut on their way."""

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
import pytest

from polyrl.engines.served.http import EventStream, Http, ServerAnswered, ServerUnreachable

Script = Callable[[EventStream[int], asyncio.StreamWriter], Awaitable[None]]


def decode(data: bytes) -> list[int]:
    return msgspec.json.decode(data, type=list[int])


def play(script: Script) -> None:
    """A server that streams what the script writes."""

    async def scenario() -> None:
        writers: asyncio.Queue[asyncio.StreamWriter] = asyncio.Queue()

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
            writers.put_nowait(writer)

        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        http = Http(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
        try:
            async with asyncio.timeout(10.0), http.events("/generate", {}, decode) as events:
                writer = await writers.get()
                await script(events, writer)
                writer.close()
        finally:
            await http.close()
            server.close()

    asyncio.run(scenario())


async def send(writer: asyncio.StreamWriter, *pieces: bytes) -> None:
    for piece in pieces:
        writer.write(b"%x\r\n%s\r\n" % (len(piece), piece))
        await writer.drain()
    await asyncio.sleep(0.05)


def test_all_that_has_come_is_read_at_once_and_half_an_event_waits_for_its_other_half():
    async def script(events: EventStream[int], writer: asyncio.StreamWriter) -> None:
        assert events.read() == []
        await send(writer, b": a comment\n\ndata: [1]\n\n", b"data: [2, 3]\n\ndata: [4", b", 5")
        assert events.read() == [1, 2, 3]
        assert events.read() == []
        await send(writer, b"]\n", b"\nda", b"ta: [6]\n\n")
        assert events.read() == [4, 5, 6]

    play(script)


def test_the_end_is_told_when_the_last_event_is_here():
    async def script(events: EventStream[int], writer: asyncio.StreamWriter) -> None:
        ended = asyncio.Event()
        events.on_end(ended.set)
        await send(writer, b"data: [1]\n\n", b"data: [DONE]\n\n")
        assert not ended.is_set()
        writer.write(b"0\r\n\r\n")
        await ended.wait()
        assert events.read() == [1]
        with pytest.raises(ServerUnreachable, match="ended without an end"):
            events.read()

    play(script)


def test_a_stream_that_breaks_off_or_makes_no_sense_is_found_out_by_reading():
    async def broken(events: EventStream[int], writer: asyncio.StreamWriter) -> None:
        await send(writer, b"data: [1]\n\n")
        assert events.read() == [1]
        writer.transport.abort()
        await asyncio.sleep(0.05)
        with pytest.raises(ServerUnreachable, match="/generate"):
            events.read()

    async def nonsense(events: EventStream[int], writer: asyncio.StreamWriter) -> None:
        await send(writer, b"data: {[}\n\n")
        with pytest.raises(ServerAnswered, match="no JSON"):
            events.read()

    play(broken)
    play(nonsense)
