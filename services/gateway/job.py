"""One client request and its sequences: token events in, final text out. It does no I/O and reads no clock.

A :class:`Job` has a :class:`Choice` for each choice of each prompt; a choice is one ``GenerateRequest`` upstream, over
all its attempts. Text and records only grow, so several readers may follow with cursors of their own: the first client,
and clients that return with the same Idempotency-Key. Text and records are kept in bytes and arrays to save memory.
"""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum, auto

import msgspec

from services.errors import ErrorInfo, RequestError, WorkLimited, error_from_info
from services.gateway.detokenize import StopSet, detokenizer
from services.gateway.echo import Echo
from services.gateway.harmony import Channels, Marks
from services.gateway.parts import PartKind, Parts
from services.gateway.records import Record, Scores
from services.gateway.sequence_trace import Exemplar, SequenceTrace
from services.gateway.tokenizer import TextCodec
from services.messages import FinishReason, GenerateRequest, TokenEvent
from services.wire import NO_PROMPT

MAX_READERS = 16
"""Readers of one job at a time; each has pieces of the answer in flight."""
_READERS_RETRY_S = 1.0


class Step(Enum):
    """What an event did to a choice."""

    IGNORED = auto()  # a duplicate, or an event of an attempt that is over
    PROGRESS = auto()
    FINISHED = auto()
    STOPPED = auto()  # by a stop string: upstream does not know yet
    FAILED = auto()
    CANCELLED = auto()  # by the queue: this gateway did not ask for it
    GAP = auto()  # tokens, or scores of the prompt, are missing before this event
    UNREAD = auto()  # a worker of an earlier release found no prompt, for it knows no names of prompts


@dataclass(frozen=True, kw_only=True, slots=True)
class Rendering:
    """What the client gets of a choice. All choices share ``stops``, and the choices of a prompt share ``echo``. With
    ``marks`` the answer has channels, of which one is its content, where alone stop strings count."""

    stops: StopSet | None = None
    echo: Echo | None = None
    logprobs: bool = False
    token_ids: bool = False
    marks: Marks | None = None


class Choice:
    """One sequence. ``text`` and the first ``records`` records may go to the client; ``finish`` is None while it runs.

    ``request`` names the prompt, whose ids are in ``prompt``; its ``token_ids`` are what earlier attempts delivered.
    """

    def __init__(
        self,
        index: int,
        request: GenerateRequest,
        prompt: array[int],
        codec: TextCodec,
        rendering: Rendering,
        trace: SequenceTrace | None = None,
    ) -> None:
        self.index = index
        self.trace = trace
        self.request = request
        self.prompt = prompt
        self.echo = rendering.echo
        self.generated = array("i")
        self.text = bytearray()  # UTF-8, without the echo
        self.parts = Parts()  # of the text
        self.cached_tokens = 0
        self.queued_ms = 0  # in the queue, of all attempts that sent a token
        self.finish: FinishReason | None = None
        self.error: RequestError | None = None
        self.recovering = False  # between the loss of an attempt and the next one
        self.missed = 0  # times that events could not be read, or scores of the prompt did not come
        self.whole = False  # whether its record has to hold the prompt, because a worker did not find it
        self.first_at: float | None = None  # monotonic seconds of the first token
        self.last_at: float | None = None
        self._scores = Scores() if rendering.logprobs else None
        self._offsets = array("q") if rendering.logprobs or rendering.token_ids else None
        self._visible = 0
        self._text = detokenizer(codec, prompt)
        self._channels = None if rendering.marks is None else Channels(rendering.marks, codec, prompt)
        self._stops = rendering.stops.finder() if rendering.stops else None
        self.started = False  # whether an event of the sequence came: from here on the answer is on its way
        self._decoded = self.echo.chars if self.echo else 0  # characters that the detokenizer returned, echo included
        self._released = self._decoded  # characters in text, echo included

    @property
    def exemplar(self) -> Exemplar | None:
        """What a histogram remembers the sequence by, if it is traced."""
        return None if self.trace is None else self.trace.exemplar

    @property
    def readable(self) -> bool:
        """Whether anything may go out: the whole echo comes first."""
        return self.started and (self.echo is None or self.echo.complete)

    @property
    def length(self) -> int:
        """Bytes of the text so far, the echo included."""
        return len(self.text) + (len(self.echo.text) if self.echo else 0)

    @property
    def reasoning_tokens(self) -> int | None:
        """Tokens of what was said before the content; None where answers have no such part."""
        return None if self._channels is None else self._channels.reasoning_tokens

    @property
    def prompt_records(self) -> int:
        return 0 if self.echo is None or self._scores is None else self.echo.records

    @property
    def records(self) -> int:
        """How many tokens may be shown one by one, tokens of an echoed prompt first."""
        return self.prompt_records + self._visible

    @property
    def nbytes(self) -> int:
        """Memory of the choice's answer. An echo counts for the first choice of its prompt."""
        own = len(self.text) + 4 * len(self.generated) + (0 if self._offsets is None else 8 * len(self._offsets))
        echo = self.echo.nbytes if self.echo and self.request.sampling.choice == 0 else 0
        return own + (self._scores.nbytes if self._scores else 0) + echo

    @property
    def per_token_s(self) -> float | None:
        """Mean seconds per token after the first; None with fewer than two."""
        if len(self.generated) < 2 or self.first_at is None or self.last_at is None:
            return None
        return (self.last_at - self.first_at) / (len(self.generated) - 1)

    def forget(self) -> None:
        """Drops an answer that no client will read to its end."""
        self._visible, self.echo = 0, None
        self.text, self._offsets, self._scores = bytearray(), None, None

    def record(self, index: int) -> Record:
        if index < self.prompt_records:
            assert self.echo is not None
            return self.echo.record(index)
        own = index - self.prompt_records
        assert self._offsets is not None
        score = None if self._scores is None else self._scores.at(own)
        return Record(self.generated[own], score, self._offsets[own])

    def accept(self, event: TokenEvent) -> Step:
        """Takes the next event of the sequence. Returns what it did, for the caller to act on."""
        if self.finish is not None or self.recovering or event.attempt < self.request.attempt:
            return Step.IGNORED
        if self._unread(event.error):
            self.whole = True
            return Step.UNREAD
        if event.error is not None:
            return self.fail(error_from_info(event.error))
        if event.finish == "cancelled":
            return Step.CANCELLED
        if event.index > len(self.generated) or not self._take_scores(event):
            return Step.GAP
        if event.attempt > self.request.attempt:
            self.request = msgspec.structs.replace(self.request, attempt=event.attempt)
        if event.scores is not None:
            return Step.PROGRESS
        return self._accept_token(event)

    def _accept_token(self, event: TokenEvent) -> Step:
        if not self.started:
            self.started = True
            self.cached_tokens = min(event.cached_tokens, len(self.prompt))
        stopped = False
        if event.index == len(self.generated) and event.token_id is not None:
            self.queued_ms += event.queued_ms
            stopped = self._take(event.token_id, event)
        elif event.finish is None:
            return Step.IGNORED
        if stopped:
            return self._end("stop", Step.FINISHED if event.finish else Step.STOPPED)
        if event.finish is None:
            return Step.PROGRESS
        return self._end("stop" if self._flush() else event.finish, Step.FINISHED)

    def _unread(self, error: ErrorInfo | None) -> bool:
        return error is not None and error.message.startswith(NO_PROMPT) and len(self.prompt) > 0 and not self.whole

    def fail(self, error: RequestError, finish: FinishReason = "error") -> Step:
        """Ends the sequence with ``error``; ``finish`` is "cancelled" where the client left."""
        self.error = error
        return self._end(finish, Step.FAILED)

    def grant(self, request: GenerateRequest) -> None:
        """Takes the attempt and deadline from the queue's reply; tokens may have come before it."""
        self.request = msgspec.structs.replace(self.request, attempt=request.attempt, deadline_ms=request.deadline_ms)

    def resubmission(self, attempt: int) -> GenerateRequest:
        """Returns the request for ``attempt``, with the delivered tokens; a scored prompt is not scored again."""
        sampling = self.request.sampling
        if sampling.prompt_logprobs is not None and self.echo is not None and self.echo.complete:
            sampling = msgspec.structs.replace(sampling, prompt_logprobs=None)
        if self.trace is not None and attempt > self.request.attempt:
            self.trace.again(attempt, len(self.generated))
        self.request = msgspec.structs.replace(
            self.request,
            attempt=attempt,
            token_ids=self.generated.tolist(),
            sampling=sampling,
            traceparent=self.request.traceparent if self.trace is None else self.trace.traceparent,
        )
        return self.request

    def _take_scores(self, event: TokenEvent) -> bool:
        """Returns False where scores of the prompt are missing before this event."""
        if self.echo is None:
            return True
        if event.scores is not None:
            return self.echo.take(event.attempt, event.scores)
        if event.prompt_logprobs is not None:
            self.echo.take_all(event.prompt_logprobs)
        return self.echo.complete or self.request.sampling.prompt_logprobs is None

    def _take(self, token_id: int, event: TokenEvent) -> bool:
        """Appends a token. Returns whether it completed a stop string. The token that ends a sequence has no text."""
        self.generated.append(token_id)
        kind, piece = self._spoken(token_id, ends=event.finish == "stop")
        if self._offsets is not None:
            self._offsets.append(self._decoded)
        if self._scores is not None:
            self._scores.add(event.logprob)
        self._decoded += len(piece)
        return self._show(piece, kind)

    def _spoken(self, token_id: int, *, ends: bool) -> tuple[PartKind, str]:
        """Returns the text of a token, and of which part it is; that of one that ``ends`` the sequence is none."""
        if ends:
            return "content", ""
        return ("content", self._text.push(token_id)) if self._channels is None else self._channels.push(token_id)

    def _show(self, piece: str, kind: PartKind) -> bool:
        stopped = False
        if self._stops is not None and kind == "reasoning":
            self._release(self._stops.flush(), "content")
        elif self._stops is not None and len(self.generated) >= self.request.sampling.min_tokens:
            piece, stopped = self._stops.push(piece)
        if piece:
            self._release(piece, kind)
        self._reveal(everything=self._released == self._decoded and not stopped)
        return stopped

    def _flush(self) -> bool:
        """Ends the text: everything held back goes out. Returns whether it contains a stop string after all."""
        kind: PartKind = "content"
        tail = self._text.flush()
        if self._channels is not None:
            kind, tail = self._channels.flush()
        self._decoded += len(tail)
        if tail and self._show(tail, kind):
            return True
        if self._stops is not None and (held := self._stops.flush()):
            self._release(held, "content")
        self._reveal(everything=True)
        return False

    def _release(self, text: str, kind: PartKind) -> None:
        if text:
            self.parts.note(len(self.text), kind)
        self.text += text.encode()
        self._released += len(text)

    def _reveal(self, *, everything: bool) -> None:
        """Shows the records of tokens whose text has begun to go out."""
        if self._offsets is None:
            return
        if everything:
            self._visible = len(self._offsets)
        while self._visible < len(self._offsets) and self._offsets[self._visible] < self._released:
            self._visible += 1

    def _end(self, finish: FinishReason, step: Step) -> Step:
        self.finish = finish
        if self.trace is not None:
            self.trace.end(finish, self.error, len(self.generated))
        return step


class Reader:
    """A reader of a job. It wakes on every progress, or (``at_end``) only when the job is over. ``give_up`` ends it; it
    is set while the reader waits for its client to read what was sent."""

    def __init__(self, *, at_end: bool) -> None:
        self.at_end = at_end
        self.give_up: Callable[[], None] | None = None
        self.wake = asyncio.Event()
        self.poked = False  # woken though there may be nothing to read


class Job:
    """A client request in flight. ``id`` is the base of its sequences' ids."""

    def __init__(self, *, job_id: str, choices: Sequence[Choice], n: int, tenant: str, created: int, arrived: float):
        self.id = job_id
        self.choices = tuple(choices)
        self.n = n
        self.tenant = tenant
        self.created = created  # Unix seconds, for the client
        self.arrived = arrived  # monotonic seconds
        self.keyed = False  # whether clients can return to it with an Idempotency-Key
        self.admitted = False  # before, it may be missing from the queue
        self.error: RequestError | None = None
        self.published_at: float | None = None  # monotonic seconds; of the oldest part that no reader has sent
        self.done = False
        self._readers: set[Reader] = set()
        self._when_done: list[Callable[[], None]] = []
        self._when_dropped: list[Callable[[], None]] = []

    @property
    def prompts(self) -> dict[str, array[int]]:
        """The prompts by the names that the requests have for them."""
        return {choice.request.prompt: choice.prompt for choice in self.choices[:: self.n]}

    @property
    def prompt_bytes(self) -> int:
        return sum(4 * len(choice.prompt) for choice in self.choices[:: self.n])

    @property
    def nbytes(self) -> int:
        """Memory of the answer so far."""
        return sum(choice.nbytes for choice in self.choices)

    @property
    def read(self) -> bool:
        """Whether a client waits for the job; none does while it is kept for a retry."""
        return not self.done or bool(self._readers)

    @property
    def started(self) -> bool:
        return self.done or any(choice.started for choice in self.choices)

    @property
    def unfinished(self) -> list[Choice]:
        return [choice for choice in self.choices if choice.finish is None]

    def open(self, *, at_end: bool) -> Reader:
        """Returns a new reader, awake at once where there is something to read already.

        Raises:
            WorkLimited: the job has the maximum of readers.
        """
        if len(self._readers) >= MAX_READERS:
            raise WorkLimited(
                f"{MAX_READERS} clients are already reading the answer for this Idempotency-Key.",
                hint="Wait until one of them has finished.",
                retry_after_s=_READERS_RETRY_S,
            )
        reader = Reader(at_end=at_end)
        self._readers.add(reader)
        if self.done or not at_end:
            reader.wake.set()
        return reader

    def close(self, reader: Reader) -> bool:
        """Removes ``reader``. Returns whether no reader is left."""
        self._readers.discard(reader)
        return not self._readers

    def end(self, error: RequestError | None = None) -> None:
        self.done = True
        self.error = error
        self.notify()
        for call in self._when_done:
            call()
        self._when_done.clear()

    def when_done(self, call: Callable[[], None]) -> None:
        """Calls ``call`` at the end of the job, or now if it has ended."""
        if self.done:
            call()
        else:
            self._when_done.append(call)

    def when_dropped(self, call: Callable[[], None]) -> None:
        """Calls ``call`` if the answer is dropped after the end of the job."""
        self._when_dropped.append(call)

    def drop(self, error: RequestError) -> None:
        """Drops the answer of a job that is over. Readers end with ``error``; readers that wait for their clients end
        at once."""
        self.error = error
        for choice in self.choices:
            choice.error = error
            choice.forget()
        for call in self._when_dropped:
            call()
        self._when_dropped.clear()
        for reader in self._readers:
            if reader.give_up is not None:
                reader.give_up()

    def note_published(self, at: float | None) -> None:
        """Notes when new tokens were published, for readers that stream them."""
        if self.published_at is None and any(not reader.at_end for reader in self._readers):
            self.published_at = at

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
