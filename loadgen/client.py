"""A lean streaming client of the completions API: what one virtual user does, and when its tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec


@dataclass(kw_only=True, slots=True)
class StreamResult:
    """A streamed completion. Times are in seconds by ``time.perf_counter``; ``return_token_ids`` asks for token ids."""

    started: float
    first_token: float | None = None
    ended: float | None = None
    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    done: bool = False
    """Whether the last event, [DONE], came."""
    completion_tokens: int = 0
    status: int = 0
    error: str | None = None
    retry_after: float | None = None
    """Seconds that the server asks to wait."""

    @property
    def whole(self) -> bool:
        """Whether the answer and its stream came to their ends."""
        return self.finish_reason is not None and self.done

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Begin and end of every wait, the one for the first chunk included."""
        return list(zip([self.started, *self.chunk_times], self.chunk_times, strict=False))


class _Usage(msgspec.Struct):
    completion_tokens: int


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] = []
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """The parts of a chunk that the client looks at."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: dict[str, Any] | None = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)


async def stream_completion(
    session: aiohttp.ClientSession,
    url: str,
    body: dict[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    on_progress: Callable[[StreamResult], None] = lambda _result: None,
) -> StreamResult:
    """POST ``body``, for one choice, to ``url``/v1/completions as a stream with usage and follow it to its end.
    ``on_progress`` gets what came so far when a stream begins and after each read."""
    payload = body | {"stream": True, "stream_options": {"include_usage": True}}
    result = StreamResult(started=time.perf_counter())
    async with session.post(f"{url}/v1/completions", json=payload, headers=headers) as response:
        result.status = response.status
        if response.status != 200:
            result.error = (await response.text())[:500]
            after = response.headers.get("Retry-After", "")
            result.retry_after = float(after) if after.isdecimal() else None
            return result
        on_progress(result)
        pending = b""
        async for data in response.content.iter_any():
            *events, pending = (pending + data).split(b"\n\n")
            for event in events:
                _read_event(event, result)
            on_progress(result)
    result.ended = time.perf_counter()
    return result


def _read_event(event: bytes, result: StreamResult) -> None:
    if event == b"data: [DONE]":
        result.done = True
    if not event.startswith(b"data: {"):
        return
    now = time.perf_counter()
    chunk = _chunk_decoder.decode(event[6:])
    if chunk.usage:
        result.completion_tokens = chunk.usage.completion_tokens
    if chunk.error:
        result.error = str(chunk.error)
    for choice in chunk.choices:
        result.text += choice.text
        result.token_ids += choice.token_ids
        result.finish_reason = choice.finish_reason or result.finish_reason
        result.first_token = result.first_token or now
        result.chunk_times.append(now)
