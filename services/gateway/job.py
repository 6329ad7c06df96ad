"""One client request and its sequences: token events in, settled text out. No I/O and no clock of its own.

A :class:`Job` has a :class:`Choice` per prompt and choice; each choice is one ``GenerateRequest`` upstream, over all
its attempts. Text and log-probability records only grow, so any number of readers may follow with cursors of their
own: the first client, and one that came back with the same Idempotency-Key.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import NamedTuple

import msgspec

from services.errors import RequestError, Unavailable, error_from_info
from services.gateway.detokenize import StopStrings, detokenizer
from services.gateway.tokenizer import TextCodec
from services.messages import FinishReason, GenerateRequest, TokenEvent, TokenLogprob


class Step(Enum):
    """What an event did to a choice."""

    IGNORED = auto()  # a duplicate, or of an attempt that is over
    PROGRESS = auto()
    FINISHED = auto()
    STOPPED = auto()  # by a stop string: upstream does not know yet
    FAILED = auto()
    GAP = auto()  # tokens are missing before this one


class Record(NamedTuple):
    """One token as log-probabilities and ``token_ids`` show it. ``offset`` counts characters of the choice's text."""

    token_id: int
    logprob: TokenLogprob | None
    offset: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """What the client wants to see of a choice."""

    stops: tuple[str, ...] = ()
    echo: str | None = None
    logprobs: bool = False
    token_ids: bool = False


class Choice:
    """One sequence. ``texts`` and ``records[:visible]`` may go to the client; ``finish`` is None while it runs."""

    def __init__(self, index: int, request: GenerateRequest, codec: TextCodec, rendering: Rendering) -> None:
        self.index = index
        self.request = request
        self.prompt_ids = request.token_ids[: request.prompt_len]
        self.generated: list[int] = []
        self.texts: list[str] = []
        self.records: list[Record] = []
        self.visible = 0
        self.prompt_records = 0
        self.cached_tokens = 0
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        self.recovering = False  # between the loss of an attempt and the next one
        self.first_at: float | None = None  # monotonic seconds of the first token
        self.last_at: float | None = None
        self._codec = codec
        self._echo = rendering.echo
        self._wants_logprobs = rendering.logprobs
        self._wants_records = rendering.logprobs or rendering.token_ids
        self._text = detokenizer(codec, self.prompt_ids)
        self._stops = StopStrings(rendering.stops) if rendering.stops else None
        self._started = False
        self._decoded = 0  # characters out of the detokeniser, echo included
        self._released = 0  # characters in texts

    @property
    def started(self) -> bool:
        """Whether an event of the sequence came: from here on the answer is on its way."""
        return self._started

    def accept(self, event: TokenEvent) -> Step:
        """Takes the next event of the sequence in; tells what the caller has to do about it."""
        if self.finish is not None or self.recovering or event.attempt < self.request.attempt:
            return Step.IGNORED
        if event.error is not None:
            return self.fail(error_from_info(event.error))
        if event.finish == "cancelled":
            return self.fail(Unavailable("The request was cancelled by the server.", hint="Send it again."))
        if event.index > len(self.generated):
            return Step.GAP
        if event.attempt > self.request.attempt:
            self.request = msgspec.structs.replace(self.request, attempt=event.attempt)
        if not self._started:
            self._start(event)
        stopped = False
        if event.index == len(self.generated) and event.token_id is not None:
            stopped = self._take(event.token_id, event)
        elif event.finish is None:
            return Step.IGNORED
        if stopped:
            return self._end("stop", Step.FINISHED if event.finish else Step.STOPPED)
        if event.finish is None:
            return Step.PROGRESS
        return self._end("stop" if self._flush() else event.finish, Step.FINISHED)

    def fail(self, error: RequestError, finish: FinishReason = "error") -> Step:
        """The sequence ends with ``error``; ``finish`` "cancelled" where that is nobody's fault."""
        self.error = error
        return self._end(finish, Step.FAILED)

    def grant(self, request: GenerateRequest) -> None:
        """Takes over the attempt and deadline that the queue gave; tokens may have come meanwhile."""
        self.request = msgspec.structs.replace(self.request, attempt=request.attempt, deadline_ms=request.deadline_ms)

    def resubmission(self, attempt: int) -> GenerateRequest:
        """The sequence as attempt number ``attempt``: the prompt, then what was delivered."""
        token_ids = [*self.prompt_ids, *self.generated]
        self.request = msgspec.structs.replace(self.request, attempt=attempt, token_ids=token_ids)
        return self.request

    def _start(self, event: TokenEvent) -> None:
        self._started = True
        self.cached_tokens = min(event.cached_tokens, len(self.prompt_ids))
        if self._echo is None:
            return
        if self._wants_logprobs and event.prompt_logprobs is not None:
            self._echo_records(self._echo, event.prompt_logprobs)
        self._decoded = len(self._echo)
        self._release(self._echo)

    def _echo_records(self, echo: str, logprobs: Sequence[TokenLogprob | None]) -> None:
        text, offset = detokenizer(self._codec), 0
        for token_id, logprob in zip(self.prompt_ids, logprobs, strict=False):
            self.records.append(Record(token_id, logprob, offset))
            offset += len(text.push(token_id)) or self._codec.special_length(token_id, echo, offset)
        self.prompt_records = self.visible = len(self.records)

    def _take(self, token_id: int, event: TokenEvent) -> bool:
        """Appends a token; whether it completed a stop string. The token that ends a sequence shows no text."""
        self.generated.append(token_id)
        piece = "" if event.finish == "stop" else self._text.push(token_id)
        if self._wants_records:
            self.records.append(Record(token_id, event.logprob, self._decoded))
        self._decoded += len(piece)
        return self._show(piece)

    def _show(self, piece: str) -> bool:
        stopped = False
        if self._stops is not None and len(self.generated) >= self.request.sampling.min_tokens:
            piece, stopped = self._stops.push(piece)
        if piece:
            self._release(piece)
        if self._wants_records:
            self._reveal(everything=self._released == self._decoded and not stopped)
        return stopped

    def _flush(self) -> bool:
        """The end of the sequence: everything held back goes out, unless it holds a stop string after all."""
        tail = self._text.flush()
        self._decoded += len(tail)
        if tail and self._show(tail):
            return True
        if self._stops is not None and (held := self._stops.flush()):
            self._release(held)
        self._reveal(everything=True)
        return False

    def _release(self, text: str) -> None:
        self.texts.append(text)
        self._released += len(text)

    def _reveal(self, *, everything: bool) -> None:
        """Records go out once the text of their token has begun to."""
        if everything:
            self.visible = len(self.records)
        while self.visible < len(self.records) and self.records[self.visible].offset < self._released:
            self.visible += 1

    def _end(self, finish: FinishReason, step: Step) -> Step:
        self.finish = finish
        del self.records[self.visible :]
        return step


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a job. A prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int


class Reader:
    """Someone who waits for a job: wakes on every progress, or (``at_end``) only when the job is over."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end
        self.wake = asyncio.Event()
        self.poked = False  # woken though there may be nothing to read


class Job:
    """A client request on its way. ``id`` is the base of its sequences' ids."""

    def __init__(self, *, job_id: str, choices: Sequence[Choice], n: int, tenant: str, created: int, arrived: float):
        self.id = job_id
        self.choices = tuple(choices)
        self.n = n
        self.tenant = tenant
        self.created = created  # Unix seconds, for the client
        self.arrived = arrived  # monotonic seconds
        self.keyed = False  # whether an Idempotency-Key can bring it back
        self.admitted = False  # until then its absence from the queue means nothing
        self.error: RequestError | None = None
        self.done = False
        self._readers: set[Reader] = set()

    @property
    def started(self) -> bool:
        return self.done or any(choice.started for choice in self.choices)

    @property
    def unfinished(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finish is None]

    def usage(self) -> Usage:
        prompts = self.choices[:: self.n]
        return Usage(
            prompt_tokens=sum(len(choice.prompt_ids) for choice in prompts),
            completion_tokens=sum(len(choice.generated) for choice in self.choices),
            cached_tokens=sum(choice.cached_tokens for choice in prompts),
        )

    def open(self, *, at_end: bool) -> Reader:
        """A new reader, awake at once where there is something to read already."""
        reader = Reader(at_end=at_end)
        self._readers.add(reader)
        if self.done or not at_end:
            reader.wake.set()
        return reader

    def close(self, reader: Reader) -> bool:
        """Whether nobody waits for the job any more."""
        self._readers.discard(reader)
        return not self._readers

    def end(self, error: RequestError | None = None) -> None:
        self.done = True
        self.error = error
        self.notify()

    def notify(self) -> None:
        for reader in self._readers:
            if self.done or not reader.at_end:
                reader.wake.set()

    def poke(self) -> None:
        """Wakes streaming readers so that they show a sign of life."""
        for reader in self._readers:
            if not reader.at_end:
                reader.poked = True
                reader.wake.set()
