"""Answers as servers write them: what of each form arrives."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from loadgen.client import Asking, StreamResult, payload_of
from loadgen.connections import Session

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ONE = b'{"choices": [{"delta": {"content": "a"}}]}'
LAST = b'{"choices": [{"delta": {"content": "b"}, "finish_reason": "stop"}]}'


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[str]:
    """A server that writes ``answer`` to each request, and closes the connection."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def result_of(answer: bytes) -> StreamResult:
    async with answering(answer) as url, Session(total_s=10.0) as session:
        return await Asking(session, url, payload_of({}), endpoint="chat").end()


@pytest.mark.parametrize(
    "events",
    [
        b"data: %s\n\ndata: %s\n\ndata: [DONE]\n\n",
        b"data:%s\r\n\r\ndata:%s\r\n\r\ndata:[DONE]\r\n\r\n",
        b": ping\n\nevent: chunk\nid: 1\ndata: %s\n\n: ping\ndata: %s\n\n: data: x\n\ndata: [DONE]\n\n",
    ],
    ids=["usual", "no space, two characters for a line", "more fields, and comments"],
)
async def test_every_form_of_events_is_read(events: bytes) -> None:
    found = await result_of(HEAD + b"\r\n" + events % (ONE, LAST))
    assert (found.text, len(found.chunk_times), found.finish_reason, found.error) == ("ab", 2, "stop", None)
    assert found.whole


@pytest.mark.parametrize("name", [b"reasoning_content", b"reasoning"])
async def test_what_a_model_thinks_are_tokens(name: bytes) -> None:
    events = b'data: {"choices": [{"delta": {"%s": "hm"}}]}\n\ndata: %s\n\ndata: [DONE]\n\n' % (name, LAST)
    found = await result_of(HEAD + b"\r\n" + events)
    assert (found.text, len(found.chunk_times), found.first_token) == ("hmb", 2, found.chunk_times[0])


async def test_an_early_hint_is_not_the_answer() -> None:
    hint = b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"
    events = b"data: %s\n\ndata: [DONE]\n\n" % LAST
    chunked = HEAD + b"Transfer-Encoding: chunked\r\n\r\n%x\r\n%s\r\n0\r\n\r\n" % (len(events), events)
    found = await result_of(hint + chunked)
    assert (found.status, found.text, found.whole) == (200, "b", True)


async def test_a_stream_that_ends_early_is_not_whole() -> None:
    found = await result_of(HEAD + b"\r\ndata: %s\n\n" % ONE)
    assert (found.text, found.whole) == ("a", False)
