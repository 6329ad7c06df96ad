"""A lean client of the completions and chat APIs: what one virtual user does, and when its tokens came."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import msgspec

from loadgen.connections import Exchange, Session

Endpoint = Literal["completions", "chat"]
PATHS: Mapping[Endpoint, str] = {"completions": "/v1/completions", "chat": "/v1/chat/completions"}
_MAX_ERROR_CHARACTERS = 500
"""Characters of a refusal that are kept."""


@dataclass(kw_only=True, slots=True)
class StreamResult:
    """A completion. Times are in seconds by ``time.perf_counter``; ``return_token_ids`` asks for token ids."""

    started: float
    first_token: float | None = None
    ended: float | None = None
    chunk_times: list[float] = field(default_factory=list)
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    tool_calls: list[Any] = field(default_factory=list)
    """As they came: whole, or in pieces where the answer was a stream."""
    finish_reason: str | None = None
    done: bool = False
    """Whether the last event, [DONE], came; of an answer that is no stream, whether it came."""
    completion_tokens: int = 0
    prompt_tokens: int | None = None
    status: int = 0
    error: str | None = None
    retry_after: float | None = None
    """Seconds that the server asks to wait."""
    request_id: str | None = None
    server: str | None = None

    @property
    def whole(self) -> bool:
        """Whether the answer and its stream came to their ends."""
        return self.finish_reason is not None and self.done

    @property
    def gaps(self) -> list[tuple[float, float]]:
        """Begin and end of every wait, the one for the first chunk included."""
        return list(zip([self.started, *self.chunk_times], self.chunk_times, strict=False))


class _Usage(msgspec.Struct):
    completion_tokens: int = 0
    prompt_tokens: int | None = None


class _Message(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    """What vLLM calls reasoning_content since 0.11."""
    tool_calls: list[Any] | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Message | None = None
    message: _Message | None = None
    token_ids: list[int] | None = None
    finish_reason: str | None = None


class _Chunk(msgspec.Struct):
    """The parts of a chunk, or of a whole answer, that the client looks at."""

    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: Any = None


_chunk_decoder = msgspec.json.Decoder(_Chunk)
_encoder = msgspec.json.Encoder()


def payload_of(body: Mapping[str, Any], *, stream: bool = True) -> bytes:
    """Returns ``body`` as it is sent, with usage at the end of a stream."""
    more = {"stream": True, "stream_options": {"include_usage": True}} if stream else {}
    return _encoder.encode({**body, **more})


class Asking:
    """A request for one choice that has been sent. ``on_progress`` gets what came so far when the answer begins and
    after each read."""

    __slots__ = ("_exchange", "_on_progress", "_pending", "_stream", "left", "result")

    def __init__(
        self,
        session: Session,
        url: str,
        payload: bytes,
        *,
        endpoint: Endpoint = "completions",
        headers: Mapping[str, str] | None = None,
        on_progress: Callable[[StreamResult], None] | None = None,
    ) -> None:
        self.result = StreamResult(started=time.perf_counter())
        self._pending, self._stream, self.left = b"", False, False
        self._on_progress = on_progress
        self._exchange = session.send(
            "POST", url, PATHS[endpoint], body=payload, headers=headers, on_head=self._begin, on_data=self._read
        )

    async def end(self) -> StreamResult:
        """Returns the answer when it has ended.

        Raises:
            Broken, TimedOut: it did not end; ``result`` has what came.
        """
        try:
            await self._exchange.end()
        finally:
            self._on_progress = None  # which may know this request: a cycle
        result = self.result
        if result.status != 200:
            result.error = self._pending.decode(errors="replace")[:_MAX_ERROR_CHARACTERS] or f"HTTP {result.status}"
            return result
        if not self._stream:
            self._take(self._pending, time.perf_counter())
            result.done = result.error is None
        result.ended = time.perf_counter()
        return result

    def leave(self) -> None:
        """Break the connection."""
        self.left = True
        self._exchange.abort()

    def _begin(self, exchange: Exchange) -> None:
        result, headers = self.result, exchange.headers
        result.status = exchange.status
        result.request_id, result.server = headers.get("x-request-id"), headers.get("server")
        if exchange.status != 200:
            after = headers.get("retry-after", "")
            result.retry_after = float(after) if after.isdecimal() else None
            return
        self._stream = "json" not in headers.get("content-type", "")
        if self._on_progress is not None:
            self._on_progress(result)

    def _read(self, data: bytes) -> None:
        if not self._stream:
            self._pending += data
            return
        now = time.perf_counter()
        *events, self._pending = (self._pending + data).replace(b"\r", b"").split(b"\n\n")
        for event in events:
            found = _data_of(event)
            if found == b"[DONE]":
                self.result.done = True
            elif found is not None:
                self._take(found, now)
        if self._on_progress is not None:
            self._on_progress(self.result)

    def _take(self, text: bytes, now: float) -> None:
        result = self.result
        try:
            chunk = _chunk_decoder.decode(text)
        except msgspec.MsgspecError as error:
            result.error = result.error or f"the server sent what is no answer of the API: {error}"
            return
        if chunk.usage:
            result.completion_tokens = chunk.usage.completion_tokens
            result.prompt_tokens = chunk.usage.prompt_tokens
        if chunk.error:
            result.error = str(chunk.error)
        for choice in chunk.choices:
            if _add(result, choice):
                result.first_token = result.first_token or now
                result.chunk_times.append(now)


def _data_of(event: bytes) -> bytes | None:
    """Returns the data of a server-sent event; None of a comment. Other fields may come before it."""
    if not event.startswith(b"data:"):
        event = event[event.find(b"\ndata:") + 1 :]
    return event[5:].strip() if event.startswith(b"data:") else None


def _add(result: StreamResult, choice: _Choice) -> bool:
    """Returns whether ``choice`` brings something: the first chunk of a chat may name the role alone."""
    message = choice.delta or choice.message
    thought = (message.reasoning_content or message.reasoning or "") if message else ""
    if message is not None:
        result.text += thought + (message.content or "")
        result.tool_calls += message.tool_calls or ()
    result.text += choice.text or ""
    result.token_ids += choice.token_ids or ()
    result.finish_reason = choice.finish_reason or result.finish_reason
    said = message is None or message.content or thought or message.tool_calls
    return bool(said or choice.token_ids or choice.finish_reason)


async def stream_completion(
    session: Session,
    url: str,
    body: Mapping[str, Any],
    *,
    headers: Mapping[str, str] | None = None,
    on_progress: Callable[[StreamResult], None] | None = None,
) -> StreamResult:
    """POST ``body``, for one choice, to ``url``/v1/completions as a stream with usage and follow it to its end.

    Raises:
        Broken, TimedOut: the connection did not come about, or was lost, or is silent.
    """
    return await Asking(session, url, payload_of(body), headers=headers, on_progress=on_progress).end()
