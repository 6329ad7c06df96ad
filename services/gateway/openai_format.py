"""Jobs as OpenAI's JSON: whole answers and server-sent events. Bytes out; the hot path is :meth:`Format.chunk`.

What does not change within a stream is encoded once; a token costs one small text encode and a concatenation.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec

from services.errors import RequestError
from services.gateway.job import Choice, Job, Record, Usage
from services.gateway.tokenizer import TextCodec

DONE = b"data: [DONE]\n\n"
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
_encode = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """``logprob`` as JSON can carry it."""
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def error_body(error: RequestError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_event(error: RequestError) -> bytes:
    """The event that ends a stream which cannot go on."""
    return b"data: " + _encode(error_body(error)) + b"\n\n"


def usage_body(usage: Usage) -> dict[str, Any]:
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


class Format(ABC):
    """One job's answer in one of OpenAI's two dialects."""

    prefix: ClassVar[str]  # of the response id
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self, job: Job, *, model: str, codec: TextCodec, logprobs: bool, token_ids: bool, include_usage: bool = False
    ) -> None:
        self._job = job
        self._codec = codec
        self._logprobs = logprobs
        self._token_ids = token_ids
        self.include_usage = include_usage
        self._head = {"id": self.prefix + job.id, "created": job.created, "model": model}
        envelope = _encode({"object": self.chunk_object, **self._head})[:-1]
        self._envelope = b"data: " + envelope
        self._before = self._envelope + b',"choices":[{"index":'
        self._close = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    @abstractmethod
    def opening(self, choice: Choice) -> bytes:
        """Events before a choice's first chunk."""

    @abstractmethod
    def _content(self, text: str) -> bytes:
        """The members of a chunk's choice that carry ``text``."""

    @abstractmethod
    def _whole_content(self, text: str) -> dict[str, Any]: ...

    @abstractmethod
    def _logprobs_of(self, records: Sequence[Record]) -> dict[str, Any]: ...

    def chunk(self, choice: Choice, text: str, start: int, end: int, *, final: bool) -> bytes:
        """One event: ``text`` and the records ``start..end`` of ``choice``; ``final`` closes the choice."""
        extras = self._extras(choice, start, end) if self._logprobs or self._token_ids else b',"logprobs":null'
        reason = b',"finish_reason":' + (_encode(choice.finish) if final else b"null")
        return b"%b%d,%b%b%b%b" % (self._before, choice.index, self._content(text), extras, reason, self._close)

    def usage_event(self) -> bytes:
        """The last chunk before [DONE] where the client asked for usage."""
        return self._envelope + b',"choices":[],"usage":' + _encode(usage_body(self._job.usage())) + b"}\n\n"

    def whole(self) -> bytes:
        """The answer of a client that does not stream."""
        choices = [self._whole_choice(choice) for choice in self._job.choices]
        usage = usage_body(self._job.usage())
        return _encode({"object": self.whole_object, **self._head, "choices": choices, "usage": usage})

    def _whole_choice(self, choice: Choice) -> dict[str, Any]:
        logprobs = self._logprobs_of(choice.records) if self._logprobs else None
        body = {
            "index": choice.index,
            **self._whole_content("".join(choice.texts)),
            "logprobs": logprobs,
            "finish_reason": choice.finish,
        }
        return body | ({"token_ids": _ids(choice, 0, len(choice.records))} if self._token_ids else {})

    def _extras(self, choice: Choice, start: int, end: int) -> bytes:
        logprobs = self._logprobs_of(choice.records[start:end]) if self._logprobs else None
        extras = b',"logprobs":' + _encode(logprobs)
        return extras + (b',"token_ids":' + _encode(_ids(choice, start, end)) if self._token_ids else b"")


def _ids(choice: Choice, start: int, end: int) -> list[int]:
    """Generated ids among the records ``start..end``; echoed prompt tokens come before them."""
    return [record.token_id for record in choice.records[max(start, choice.prompt_records) : end]]


class CompletionFormat(Format):
    """``/v1/completions``, with its legacy log-probabilities: parallel lists, alternatives as text -> logprob."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def opening(self, choice: Choice) -> bytes:  # noqa: ARG002 - completions have no opening
        return b""

    def _content(self, text: str) -> bytes:
        return b'"text":' + _encode(text)

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"text": text}

    def _logprobs_of(self, records: Sequence[Record]) -> dict[str, Any]:
        return {
            "tokens": [self._codec.token_text(record.token_id) for record in records],
            "token_logprobs": [
                None if record.logprob is None else finite(record.logprob.logprob) for record in records
            ],
            "top_logprobs": [self._alternatives(record) for record in records],
            "text_offset": [record.offset for record in records],
        }

    def _alternatives(self, record: Record) -> dict[str, float] | None:
        """Best first. Tokens of equal text keep the better value; the drawn token is always among them."""
        if record.logprob is None:
            return None
        found: dict[str, float] = {}
        for token_id, logprob in [*record.logprob.top, (record.token_id, record.logprob.logprob)]:
            found.setdefault(self._codec.token_text(token_id), finite(logprob))
        return found


class ChatFormat(Format):
    """``/v1/chat/completions``."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def opening(self, choice: Choice) -> bytes:
        delta = b'"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null'
        return b"%b%d,%b%b" % (self._before, choice.index, delta, self._close)

    def _content(self, text: str) -> bytes:
        return b'"delta":{"content":' + _encode(text) + b"}" if text else b'"delta":{}'

    def _whole_content(self, text: str) -> dict[str, Any]:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _logprobs_of(self, records: Sequence[Record]) -> dict[str, Any]:
        return {"content": [self._entry(record) for record in records], "refusal": None}

    def _entry(self, record: Record) -> dict[str, Any]:
        assert record.logprob is not None, "log-probabilities were asked for"
        top = [self._token(token_id, logprob) for token_id, logprob in record.logprob.top]
        return {**self._token(record.token_id, record.logprob.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._codec.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


class Cursor:
    """How far a reader of a job has got."""

    def __init__(self, job: Job, form: Format) -> None:
        self._job = job
        self._format = form
        self._places = [[0, 0, 0] for _ in job.choices]  # texts, records, and whether opened (1) or closed (2)

    def take(self) -> bytes:
        """Events for all that is new since the last call. Tokens that came together share an event."""
        parts = [self._advance(choice, place) for choice, place in zip(self._job.choices, self._places, strict=True)]
        return b"".join(part for part in parts if part)

    def _advance(self, choice: Choice, place: list[int]) -> bytes:
        texts, records, stage = place
        final = choice.finish is not None
        if stage == 2 or choice.error is not None or (not final and len(choice.texts) == texts):
            return b""
        text = choice.texts[texts] if len(choice.texts) == texts + 1 else "".join(choice.texts[texts:])
        place[:] = len(choice.texts), choice.visible, 2 if final else 1
        opening = self._format.opening(choice) if stage == 0 else b""
        return opening + self._format.chunk(choice, text, records, choice.visible, final=final)
