"""Sends requests when they are due, whatever the server does, and follows each to its end.

A schedule and a workload come in; what clients saw goes out (:class:`~loadgen.seen.Seen`). What is to be sent is made
before it is due, and goes out from the timer's own call: nothing that waits for answers can be in between.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from array import array
from collections import deque
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

from loadgen.answers import Answers
from loadgen.client import Asking, Endpoint, StreamResult, payload_of
from loadgen.connections import Broken, Session, TimedOut
from loadgen.manners import TRY_AGAIN, Manners
from loadgen.results import Outcome
from loadgen.seen import Seen
from loadgen.timers import Timers
from loadgen.workload.bodies import Bodies
from loadgen.workload.conversation import Conversation, Source

AHEAD = 5_000
"""Requests that are made before they are due: all of a short run, before its begin."""


@dataclass(frozen=True, slots=True)
class _Request:
    """A turn, as it will be sent. ``after``: chunks until the client hangs up."""

    number: int
    turn: int
    conversation: Conversation
    body: Mapping[str, object]
    payload: bytes
    headers: Mapping[str, str]
    after: int | None


@dataclass(kw_only=True, slots=True)
class Runner:
    """Clients of the server at ``url``. ``key``: of those without a tenant. ``answers`` are what they must get, if
    anything is known. ``seen`` grows with each request that ends, unless ``keep`` takes it. Moments are seconds after
    ``began``."""

    session: Session
    timers: Timers
    url: str
    bodies: Bodies
    source: Source
    manners: Manners
    stream: bool = True
    key: str | None = None
    answers: Answers | None = None
    on_answer: Callable[[Mapping[str, object], StreamResult], None] | None = None
    """Gets the body and the answer of each request that is answered."""
    seen: list[Seen] = field(default_factory=list)
    keep: Callable[[Seen], None] | None = None
    """Gets what would go into ``seen``."""
    began: float = 0.0
    """By time.perf_counter."""
    in_flight: int = 0
    sent: int = 0
    ended: int = 0
    lately: deque[bool] = field(default_factory=partial(deque, maxlen=1000))
    """Whether the last requests have failed."""
    begun: int = 0
    """Conversations."""
    _due: Iterator[tuple[int, float]] = field(default_factory=lambda: iter(()))
    _waiting: deque[tuple[_Request, float]] = field(default_factory=deque)
    """Made, in the order in which they are due."""
    _tasks: set[asyncio.Task[None]] = field(default_factory=set)
    _all_sent: asyncio.Event = field(default_factory=asyncio.Event)
    _all_ended: asyncio.Event = field(default_factory=asyncio.Event)
    _fault: BaseException | None = None

    def prepare(self, due: Iterable[tuple[int, float]]) -> None:
        """Take the numbers and times of conversations, in the order of the times, and make the first requests."""
        self._due = iter(due)
        for number, moment in itertools.islice(self._due, AHEAD):
            self._waiting.append((self._made(number), moment))

    async def open_loop(self, began: float) -> None:
        """Send what was prepared, each at its time after ``began``, and return when all has ended."""
        self.began = began
        self._arm()
        await self._all_sent.wait()
        await self._rest()

    async def closed_loop(self, clients: int, numbers: Iterable[int], began: float, seconds: float | None) -> None:
        """Have ``clients`` send conversations one after the other until ``numbers``, or ``seconds``, are over."""
        self.began = began
        left = iter(numbers)

        async def client() -> None:
            for number in left:
                if seconds is not None and self._now() >= seconds:
                    return
                await self._converse(self._made(number), self._now(), None)

        for _ in range(clients):
            self._start(client())
        await self._rest()

    async def stop(self) -> None:
        """Send nothing more, and hang up on what is under way, which is seen as unfinished."""
        self._waiting.clear()
        self._due = iter(())
        self._all_sent.set()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _now(self) -> float:
        return time.perf_counter() - self.began

    def _start(self, work: Coroutine[object, object, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._ended)

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._fault = fault
            self._all_sent.set()
        if not self._tasks or self._fault:
            self._all_ended.set()

    async def _rest(self) -> None:
        """Wait for all tasks. One that a fault of this program ended fails the run."""
        while self._tasks and self._fault is None:
            self._all_ended.clear()
            await self._all_ended.wait()
        if self._fault is not None:
            await self.stop()
            raise self._fault

    def _made(self, number: int) -> _Request:
        return self._request(number, self.source.conversation(number), 0, ())

    def _request(self, number: int, conversation: Conversation, turn: int, answers: Sequence[StreamResult]) -> _Request:
        body = self.bodies.body(conversation, turn, answers)
        headers = {}
        key = conversation.tenant.key if conversation.tenant and conversation.tenant.key else self.key
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if self.manners.keyed:
            headers["Idempotency-Key"] = uuid.uuid4().hex
        after = self.manners.leaves_after(number, turn, conversation.turns[turn].output_tokens)
        payload = payload_of(body, stream=self.stream)
        return _Request(number, turn, conversation, body, payload, headers, after)

    def _arm(self) -> None:
        self.timers.at(self.began + self._waiting[0][1], self._send_next)

    def _send_next(self) -> None:
        """Called when the first of those that wait is due."""
        if not self._waiting:
            return  # stopped
        request, moment = self._waiting.popleft()
        self._start(self._converse(request, moment, self._ask(request)))
        if self._waiting:
            self._arm()

    def _make_another(self) -> None:
        """Make a request for the one that has gone out."""
        following = next(self._due, None)
        if following is not None:
            self._waiting.append((self._made(following[0]), following[1]))
            if len(self._waiting) == 1:
                self._arm()
        elif not self._waiting:
            self._all_sent.set()

    def _ask(self, request: _Request) -> Asking:
        on_progress: Callable[[StreamResult], None] | None = None
        held: list[Asking] = []
        if request.after is not None:
            on_progress = partial(_maybe_leave, held, request.after)
        endpoint: Endpoint = self.bodies.endpoint
        asking = Asking(
            self.session, self.url, request.payload, endpoint=endpoint, headers=request.headers, on_progress=on_progress
        )
        held.append(asking)
        self.in_flight += 1
        self.sent += 1
        return asking

    async def _converse(self, request: _Request, due: float, asking: Asking | None) -> None:
        """Follow one conversation from its first turn, which ``asking`` has sent, to its last."""
        conversation = request.conversation
        answers: list[StreamResult] = []
        self.begun += 1
        if asking is not None:
            self._make_another()
        for turn in range(len(conversation.turns)):
            if turn:
                due = self._now() + conversation.turns[turn].think_s
                request = self._request(request.number, conversation, turn, answers)
                await self.timers.until(self.began + due)
            seen, result = await self._follow(request, due, asking or self._ask(request))
            asking = None
            self._keep(seen)
            if seen.outcome not in ("ok", "wrong"):
                return
            answers.append(result)

    async def _follow(self, request: _Request, due: float, asking: Asking) -> tuple[Seen, StreamResult]:
        """Returns what became of a request, all tries taken together."""
        turn = request.conversation.turns[request.turn]
        sent = asking.result.started - self.began
        seen = Seen(number=request.number, scheduled=due, lag_s=sent - due, sent=sent, outcome="failed")
        seen.tenant, seen.name = request.conversation.tenant, turn.name
        try:
            while (pause_s := await self._try(request, asking, seen)) is not None:
                await self.timers.until(time.perf_counter() + pause_s)
                asking = self._ask(request)
                seen.tries += 1
        except asyncio.CancelledError:
            seen.outcome, seen.error, seen.ended = "unfinished", None, self._now()
            self._note(request, seen, asking.result)
            self._keep(seen)
            raise
        self._note(request, seen, asking.result)
        return seen, asking.result

    async def _try(self, request: _Request, asking: Asking, seen: Seen) -> float | None:
        """Returns after how long it is to be tried again; None: this was its end."""
        result, broken = asking.result, False
        try:
            await asking.end()
            seen.outcome, seen.error = _judged(result)
        except TimedOut as error:
            seen.outcome, seen.error = "timeout", ("timeout", str(error))
            error.__traceback__ = None  # its frames know the exchange, which knows it: a cycle
        except Broken as error:
            left = request.after is not None and asking.left
            broken = not left
            seen.outcome = "disconnected" if left else "failed"
            seen.error = None if left else ("connection", str(error))
            error.__traceback__ = None
        finally:
            self.in_flight -= 1
        seen.ended = self._now()
        if result.status in TRY_AGAIN:
            seen.refusals.append((seen.ended, result.status, result.retry_after is not None))
        if seen.outcome in ("ok", "disconnected", "timeout"):
            return None
        return self.manners.pause_s(result, seen.tries, broken=broken)

    def _keep(self, seen: Seen) -> None:
        self.ended += 1
        self.lately.append(seen.outcome not in ("ok", "disconnected"))
        (self.keep or self.seen.append)(seen)

    def _note(self, request: _Request, seen: Seen, result: StreamResult) -> None:
        seen.status, seen.request_id = result.status, result.request_id
        seen.prompt_tokens = result.prompt_tokens
        seen.output_tokens = result.completion_tokens or len(result.token_ids) or len(result.chunk_times)
        if result.chunk_times:
            seen.first_token = result.chunk_times[0] - self.began
            seen.gaps = array("d", (b - a for a, b in itertools.pairwise(result.chunk_times)))
        if seen.outcome == "ok" and self.on_answer is not None:
            self.on_answer(request.body, result)
        if seen.outcome == "ok" and self.answers is not None:
            seen.checked, seen.wrong = self.answers.check(request.number, request.body, result)
            seen.outcome = "wrong" if seen.wrong else "ok"


def _maybe_leave(held: Sequence[Asking], after: int, result: StreamResult) -> None:
    if held and len(result.chunk_times) >= after and not result.done:
        held[0].leave()


def _judged(result: StreamResult) -> tuple[Outcome, tuple[str, str] | None]:
    if result.status in TRY_AGAIN:
        return "refused", (f"http {result.status}", result.error or "")
    if result.status != 200:
        return "failed", (f"http {result.status}", result.error or "")
    if result.error is not None:
        return "failed", ("in the stream", result.error)
    if not result.whole:
        return "failed", ("cut off", "the stream ended without its end")
    return "ok", None
