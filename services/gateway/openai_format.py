"""Jobs in, OpenAI's JSON out as bytes: whole answers and server-sent events. :meth:`Format.chunk` is the hot path.

The constant parts of a stream are encoded once; a token costs one small text encode and a concatenation. Long answers
come in pieces: they may have millions of log-probabilities, and only one piece is in memory at a time.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, ClassVar

import msgspec

from services.errors import RequestError
from services.gateway.job import Choice, Job
from services.gateway.parts import PartKind
from services.gateway.records import Record
from services.gateway.tokenizer import TextCodec

DONE = b"data: [DONE]\n\n"
REASONING = b"reasoning_content", b"reasoning"
"""Names of the reasoning in messages of chat: that of older clients, and vLLM's newer one."""
PIECE_RECORDS = 128
PIECE_BYTES = 16 * 1024
"""Records without alternatives, and bytes of a text, in one event or one piece of a whole answer."""
TAKE_BYTES = 64 * 1024
"""Bytes of events that are encoded at a time."""
_SMALL_ALTERNATIVES = 4  # a record with up to so many is about as long as one without
_PLACE_BYTES = 160  # memory of a reader's place in a choice
_LOWEST_LOGPROB = -9999.0  # JSON has no infinity
_encode = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """Returns ``logprob``, or the lowest number where JSON cannot represent it."""
    return logprob if math.isfinite(logprob) else _LOWEST_LOGPROB


def error_body(error: RequestError) -> dict[str, Any]:
    """Returns OpenAI's error object."""
    return {"error": {"message": error.message, "type": error.kind, "param": error.param, "code": error.code}}


def error_event(error: RequestError) -> bytes:
    """Returns the event that ends a stream which cannot go on."""
    return b"data: " + _encode(error_body(error)) + b"\n\n"


def usage_body(job: Job) -> dict[str, Any]:
    """Returns the token counts of ``job``. A prompt counts once however many choices it has."""
    firsts = job.choices[:: job.n]
    prompt, completion = sum(len(c.prompt) for c in firsts), sum(len(c.generated) for c in job.choices)
    thought = [c.reasoning_tokens for c in job.choices if c.reasoning_tokens is not None]
    details = {"completion_tokens_details": {"reasoning_tokens": sum(thought)}} if thought else {}
    return {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "total_tokens": prompt + completion,
        "prompt_tokens_details": {"cached_tokens": sum(c.cached_tokens for c in firsts)},
        **details,
    }


class Format(ABC):
    """One job's answer, in one of OpenAI's two dialects."""

    prefix: ClassVar[str]  # of the response id
    whole_object: ClassVar[str]
    chunk_object: ClassVar[str]

    def __init__(
        self,
        job: Job,
        *,
        model: str,
        codec: TextCodec,
        logprobs: bool,
        token_ids: bool,
        include_usage: bool = False,
        continuous_usage: bool = False,
    ) -> None:
        self._job = job
        self._codec = codec
        self._logprobs = logprobs
        self._token_ids = token_ids
        self.include_usage = include_usage
        self._continuous_usage = include_usage and continuous_usage
        alternatives = job.choices[0].request.sampling.logprobs or 0
        self.piece_records = max(1, PIECE_RECORDS // (1 + alternatives // _SMALL_ALTERNATIVES))
        self.id = self.prefix + job.id
        self._head = {"id": self.id, "created": job.created, "model": model}
        envelope = _encode({"object": self.chunk_object, **self._head})[:-1]
        self._envelope = b"data: " + envelope
        self._before = self._envelope + b',"choices":[{"index":'
        self._close = b'}],"usage":null}\n\n' if include_usage else b"}]}\n\n"

    def _closing(self) -> bytes:
        """Returns the end of an event, after its choice."""
        if not self._continuous_usage:
            return self._close
        return b'}],"usage":' + _encode(usage_body(self._job)) + b"}\n\n"

    def opening(self, choice: Choice) -> bytes:  # noqa: ARG002 - the dialect decides
        """Returns the events before a choice's first chunk."""
        return b""

    @abstractmethod
    def _content(self, text: str, kind: PartKind) -> bytes:
        """Returns the members of a chunk's choice that carry ``text``, which is of ``kind``."""

    @abstractmethod
    def _whole_content(self, choice: Choice) -> Iterator[bytes]:
        """Yields the members of a whole answer's choice that carry its text, in pieces."""

    @abstractmethod
    def _logprobs_of(self, records: Sequence[Record]) -> dict[str, Any]: ...

    @abstractmethod
    def _whole_logprobs(self, choice: Choice) -> Iterator[bytes]:
        """Yields the JSON of :meth:`_logprobs_of` for all records, in pieces."""

    @property
    def heavy(self) -> bool:
        """Whether the whole answer takes long to encode."""
        records = sum(choice.records for choice in self._job.choices) if self._logprobs or self._token_ids else 0
        return records > self.piece_records or sum(choice.length for choice in self._job.choices) > TAKE_BYTES

    @property
    def has_records(self) -> bool:
        """Whether the client gets tokens one by one."""
        return self._logprobs or self._token_ids

    def chunk(
        self, choice: Choice, text: str, start: int, end: int, *, final: bool, kind: PartKind = "content"
    ) -> bytes:
        """Returns one event: ``text`` and the records ``start..end`` of ``choice``; ``final`` closes the choice."""
        extras = self._extras(choice, start, end) if self._logprobs or self._token_ids else b',"logprobs":null'
        reason = b',"finish_reason":' + (_encode(choice.finish) if final else b"null")
        content = self._content(text, kind)
        return b"%b%d,%b%b%b%b" % (self._before, choice.index, content, extras, reason, self._closing())

    def usage_event(self) -> bytes:
        """Returns the last chunk before [DONE] where the client asked for usage."""
        return self._envelope + b',"choices":[],"usage":' + _encode(usage_body(self._job)) + b"}\n\n"

    def whole(self) -> Iterator[bytes]:
        """Yields the answer of a client that does not stream, in pieces."""
        yield _encode({"object": self.whole_object, **self._head})[:-1] + b',"choices":['
        for choice in self._job.choices:
            yield b"," if choice.index else b""
            yield from self._whole_choice(choice)
        yield b'],"usage":' + _encode(usage_body(self._job)) + b"}"

    def _whole_choice(self, choice: Choice) -> Iterator[bytes]:
        yield b'{"index":%d,' % choice.index
        yield from self._whole_content(choice)
        yield b',"logprobs":'
        yield from self._whole_logprobs(choice) if self._logprobs else (b"null",)
        yield b',"finish_reason":' + _encode(choice.finish)
        if self._token_ids:
            yield b',"token_ids":'
            yield from self._listed(choice, choice.prompt_records, lambda record: record.token_id)
        yield b"}"

    def _extras(self, choice: Choice, start: int, end: int) -> bytes:
        records = [choice.record(index) for index in range(start, end)]
        extras = b',"logprobs":' + _encode(self._logprobs_of(records) if self._logprobs else None)
        ids = [record.token_id for record in records[max(0, choice.prompt_records - start) :]]  # generated ones alone
        return extras + (b',"token_ids":' + _encode(ids) if self._token_ids else b"")

    def _listed(self, choice: Choice, first: int, member: Callable[[Record], Any]) -> Iterator[bytes]:
        """Yields the JSON list of ``member`` of each record from ``first`` on, in pieces."""
        yield b"["
        for start in range(first, choice.records, self.piece_records):
            end = min(start + self.piece_records, choice.records)
            members = [member(choice.record(index)) for index in range(start, end)]
            yield (b"," if start > first else b"") + _encode(members)[1:-1]
        yield b"]"


def _cut(text: bytes | bytearray, start: int) -> int:
    """Returns the end of the piece of ``text`` (UTF-8) that begins at ``start``."""
    end = min(len(text), start + PIECE_BYTES)
    while end < len(text) and text[end] & 0xC0 == 0x80:  # inside a character
        end -= 1
    return end


def _characters(text: bytes | bytearray) -> Iterator[bytes]:
    """Yields the characters of ``text`` in a JSON string, in pieces."""
    start = 0
    while start < len(text):
        end = _cut(text, start)
        yield _encode(text[start:end].decode())[1:-1]
        start = end


def _part(choice: Choice, kind: PartKind) -> Iterator[bytes]:
    """Yields the characters of all parts of the text that are ``kind``, in pieces."""
    for begin, end in choice.parts.of(kind, len(choice.text)):
        yield from _characters(choice.text[begin:end])


class CompletionFormat(Format):
    """``/v1/completions``, with its legacy log-probabilities: parallel lists, alternatives as text -> logprob."""

    prefix = "cmpl-"
    whole_object = chunk_object = "text_completion"

    def _content(self, text: str, kind: PartKind) -> bytes:  # noqa: ARG002 - completions have no channels
        return b'"text":' + _encode(text)

    def _whole_content(self, choice: Choice) -> Iterator[bytes]:
        yield b'"text":"'
        for text in (choice.echo.text if choice.echo else b"", choice.text):
            yield from _characters(text)
        yield b'"'

    def _logprobs_of(self, records: Sequence[Record]) -> dict[str, Any]:
        return {name: [member(record) for record in records] for name, member in self._members()}

    def _whole_logprobs(self, choice: Choice) -> Iterator[bytes]:
        for name, member in self._members():
            yield (b"{" if name == "tokens" else b",") + _encode(name) + b":"
            yield from self._listed(choice, 0, member)
        yield b"}"

    def _members(self) -> tuple[tuple[str, Callable[[Record], Any]], ...]:
        return (
            ("tokens", lambda record: self._codec.token_text(record.token_id)),
            ("token_logprobs", lambda record: None if record.logprob is None else finite(record.logprob.logprob)),
            ("top_logprobs", self._alternatives),
            ("text_offset", lambda record: record.offset),
        )

    def _alternatives(self, record: Record) -> dict[str, float] | None:
        """Returns the alternatives, best first, always with the drawn token. Equal texts keep the better value."""
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
        return b"%b%d,%b%b" % (self._before, choice.index, delta, self._closing())

    def _content(self, text: str, kind: PartKind) -> bytes:
        names = (b"content",) if kind == "content" else REASONING
        said = _encode(text)
        return b'"delta":{' + b",".join(b'"%b":%b' % (name, said) for name in names if text) + b"}"

    def _whole_content(self, choice: Choice) -> Iterator[bytes]:
        yield b'"message":{"role":"assistant","content":"'
        yield from _part(choice, "content")
        yield b'","refusal":null'
        for name in () if choice.reasoning_tokens is None else REASONING:
            yield b',"%b":"' % name
            yield from _part(choice, "reasoning")
            yield b'"'
        yield b"}"

    def _logprobs_of(self, records: Sequence[Record]) -> dict[str, Any]:
        return {"content": [self._entry(record) for record in records], "refusal": None}

    def _whole_logprobs(self, choice: Choice) -> Iterator[bytes]:
        yield b'{"content":'
        yield from self._listed(choice, 0, self._entry)
        yield b',"refusal":null}'

    def _entry(self, record: Record) -> dict[str, Any]:
        assert record.logprob is not None, "log-probabilities were asked for"
        top = [self._token(token_id, logprob) for token_id, logprob in record.logprob.top]
        return {**self._token(record.token_id, record.logprob.logprob), "top_logprobs": top}

    def _token(self, token_id: int, logprob: float) -> dict[str, Any]:
        raw = self._codec.token_bytes(token_id)
        return {"token": raw.decode(errors="replace"), "logprob": finite(logprob), "bytes": list(raw)}


class _Place:
    """How far a reader has got in one choice."""

    __slots__ = ("closed", "echoed", "opened", "records", "text")

    def __init__(self) -> None:
        self.echoed = 0  # bytes of the echo
        self.text = 0  # bytes of the text
        self.records = 0
        self.opened = self.closed = False


class Cursor:
    """How far a reader of a job has got."""

    def __init__(self, job: Job, form: Format) -> None:
        self._job = job
        self._format = form
        self._places = [_Place() for _ in job.choices]
        self._turn = 0  # the choice to begin with, so that each gets its share

    def take(self) -> bytes:
        """Returns events for the news since the last call, TAKE_BYTES or little more; empty where nothing is left.
        Tokens that came together share an event."""
        parts: list[bytes] = []
        size, count = 0, len(self._places)
        for number in chain(range(self._turn, count), range(self._turn)):
            while size < TAKE_BYTES and (part := self._advance(self._job.choices[number], self._places[number])):
                parts.append(part)
                size += len(part)
            if size >= TAKE_BYTES:
                self._turn = number
                break
        return b"".join(parts)

    @property
    def nbytes(self) -> int:
        return _PLACE_BYTES * len(self._places)

    @property
    def heavy(self) -> bool:
        """Whether the next :meth:`take` may take long."""
        if not self._format.has_records:
            return False
        behind = sum(max(0, c.records - p.records) for c, p in zip(self._job.choices, self._places, strict=True))
        return behind > self._format.piece_records

    def _advance(self, choice: Choice, place: _Place) -> bytes:
        """Returns the next event of ``choice``; empty where there is none yet or no more."""
        if place.closed or choice.error is not None or not choice.readable:
            return b""
        kind, text = self._text(choice, place)
        full = place.records + self._format.piece_records
        end = min(choice.records, full)
        all_text = place.echoed + place.text == choice.length
        over = choice.finish is not None and all_text and end == choice.records
        if not text and not over and end < full:
            return b""  # a few records without text wait for it
        opening = b"" if place.opened else self._format.opening(choice)
        event = self._format.chunk(choice, text, place.records, end, final=over, kind=kind)
        place.records, place.opened, place.closed = end, True, over
        return opening + event

    @staticmethod
    def _text(choice: Choice, place: _Place) -> tuple[PartKind, str]:
        echo = choice.echo.text if choice.echo else b""
        if place.echoed < len(echo):
            start, place.echoed = place.echoed, _cut(echo, place.echoed)
            return "content", echo[start : place.echoed].decode()
        kind, end = choice.parts.at(place.text, len(choice.text))
        start, place.text = place.text, min(end, _cut(choice.text, place.text))
        return kind, choice.text[start : place.text].decode()
