"""A lean streaming client of the completions API: what one virtual user does, and when its tokens came."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


@dataclass(kw_only=True, slots=True)
class StreamResult:
    """One streamed completion. Times in seconds by ``time.perf_counter``."""

    started: float
    first_token: float | None = None
    ended: float | None = None
    chunk_times: list[float] = field(default_factory=list)
    completion_tokens: int = 0
    status: int = 0
    error: str | None = None


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Chunk(msgspec.Struct):
    """The parts of a chunk that the client looks at."""

    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


async def stream_completion(session: aiohttp.ClientSession, url: str, body: dict[str, Any]) -> StreamResult:
    """POST ``body`` to ``url``/v1/completions as a stream with usage and follow it to its end."""
    payload = body | {"stream": True, "stream_options": {"include_usage": True}}
    result = StreamResult(started=time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=payload) as response:
        result.status = response.status
        if response.status != 200:
            result.error = (await response.text())[:500]
            return result
        pending = b""
        async for data in response.content.iter_any():
            *events, pending = (pending + data).split(b"\n\n")
            for event in events:
                _read_event(event, result)
    result.ended = time.perf_counter()
    return result


def _read_event(event: bytes, result: StreamResult) -> None:
    if not event.startswith(b"data: {"):
        return
    now = time.perf_counter()
    if b'"choices":[]' in event or b'"error"' in event:
        chunk = _chunk_decoder.decode(event[6:])
        if chunk.usage:
            result.completion_tokens = chunk.usage.completion_tokens
        if chunk.error:
            result.error = str(chunk.error)
        return
    result.first_token = result.first_token or now
    result.chunk_times.append(now)
