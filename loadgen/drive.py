"""One run, in this process or in several: from a plan to its results."""

from __future__ import annotations

import asyncio
import gc
import itertools
import multiprocessing
import signal
import ssl
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

import msgspec

from loadgen.answers import line_of
from loadgen.client import StreamResult
from loadgen.connections import Session
from loadgen.errors import ProcessLost
from loadgen.interruption import Interruption, signals
from loadgen.parts import Ending, Part, cut_short, requests_of, summed_up
from loadgen.plan import Closed, Plan
from loadgen.results import Run
from loadgen.runner import Runner
from loadgen.saturation import EVERY_S, Saturation
from loadgen.seen import Seen
from loadgen.spool import PIECE, Spool
from loadgen.timers import Timers

T = TypeVar("T")
SOON_S = 0.05
"""From when all is made until the schedule begins."""
LEAD_S = 60e-6
_ALL_READY_S = 0.3


@dataclass(frozen=True, slots=True)
class Progress:
    """Where a run stands, ``seconds`` after its begin."""

    seconds: float
    sent: int
    ended: int
    in_flight: int
    failed: int


@dataclass(frozen=True, slots=True)
class Driven:
    """A run, and each of its requests, which a long one has in ``parts`` alone. ``saturated``: it was stopped, for the
    server's backlog grew."""

    run: Run
    seen: Sequence[Seen]
    saturated: bool
    parts: Sequence[Part] = ()

    def every(self) -> Iterator[Seen]:
        """Returns each request, those of a long run in no order."""
        return iter(self.seen) if self.seen else itertools.chain.from_iterable(map(requests_of, self.parts))


Report = Callable[[Progress], None]


def drive(
    plan: Plan,
    processes: int = 1,
    report: Report | None = None,
    on_begin: Callable[[float], None] = lambda _at: None,
    stop: Interruption | None = None,
) -> Driven:
    """Returns what a run of ``plan`` saw. It blocks until the last request has ended, or ``stop`` is asked for.
    ``on_begin`` gets second 0 of the schedule, in Unix seconds, before it comes."""
    stop = stop or Interruption()
    if processes == 1:
        with stop.heard():
            parts = [on_loop(part_of(plan, report, on_begin=on_begin, stop=stop))]
    else:
        parts = _spread(plan, processes, on_begin, stop)
    run, seen = summed_up(plan, parts)
    run = msgspec.structs.replace(run, cut_short=cut_short(parts, stop.asked))
    return Driven(run, seen, any(part.ending == "saturated" for part in parts), parts)


def on_loop(work: Coroutine[Any, Any, T]) -> T:
    """Returns what ``work`` does, on uvloop where that is installed, without pauses of the garbage collector."""
    factory: Callable[[], asyncio.AbstractEventLoop] | None = None
    with suppress(ImportError):
        import uvloop

        factory = uvloop.new_event_loop
    with asyncio.Runner(loop_factory=factory) as runner, _no_collection():
        return runner.run(work)


@contextmanager
def _no_collection() -> Iterator[None]:
    """A full collection stops the process for tens of milliseconds, in which requests are late."""
    gc.collect()
    gc.freeze()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.unfreeze()


async def part_of(
    plan: Plan,
    report: Report | None = None,
    ready: Callable[[], float] | None = None,
    on_begin: Callable[[float], None] = lambda _at: None,
    stop: Interruption | None = None,
) -> Part:
    """Returns what this process sees of its shard of ``plan``, until ``stop`` is asked for. ``ready`` is called when
    all is made, and returns when to start."""
    timers = Timers(lead_s=_lead_s(plan))
    tls = ssl.create_default_context(cafile=plan.ca) if plan.ca else None
    limits = plan.limits
    async with Session(
        connect_s=limits.connect_s, silence_s=limits.silence_s, total_s=limits.total_s, tls=tls, between=timers.poll
    ) as session:
        lines: list[bytes] = []
        spool = _spool(plan)
        runner = Runner(
            session=session,
            timers=timers,
            url=plan.url,
            bodies=plan.bodies,
            source=plan.source,
            manners=plan.manners,
            stream=plan.stream,
            key=plan.key,
            answers=plan.answers,
            on_answer=_recording(lines) if plan.record_to else plan.on_answer,
            keep=spool.add if spool else None,
        )
        if not isinstance(plan.load, Closed):
            index, of = plan.shard
            runner.prepare((number, plan.load.times[number]) for number in range(index, len(plan.load.times), of))
        gc.freeze()
        start_at = plan.start_at if ready is None else ready()
        started_at = time.time()
        began_at = started_at + SOON_S if start_at is None else start_at
        on_begin(began_at)
        began = time.perf_counter() + began_at - time.time()
        ending = await _run(plan, runner, began, report, stop or Interruption())
        cut_at_s = time.perf_counter() - began if ending == "cut short" else None
        timers.close()
        if plan.record_to is not None:
            with plan.record_to.open("ab", buffering=0) as file:  # of other processes, too: in one piece
                file.write(b"".join(lines))
        return Part(
            seen=runner.seen,
            spooled=spool.close() if spool else None,
            began_at=began_at,
            started_at=started_at,
            connections=session.opened,
            ending=ending,
            cut_at_s=cut_at_s,
            unsent=_unsent(plan, runner.begun),
        )


def _spool(plan: Plan) -> Spool | None:
    """Returns where requests go that may be more than a piece; None where they fit into memory."""
    requests = plan.load.requests if isinstance(plan.load, Closed) else len(plan.load.times)
    index, of = plan.shard
    if plan.spool is None or (requests is not None and requests <= PIECE):
        return None
    return Spool(plan.spool / f"{index}-of-{of}")


def _unsent(plan: Plan, begun: int) -> int | None:
    index, of = plan.shard
    requests = plan.load.requests if isinstance(plan.load, Closed) else len(plan.load.times)
    return None if requests is None else len(range(index, requests, of)) - begun


def _lead_s(plan: Plan) -> float:
    """Of the timers: none where it would be a good part of a gap."""
    gap_s = None if isinstance(plan.load, Closed) else plan.load.mean_gap_s
    return LEAD_S if gap_s is not None and gap_s * plan.shard[1] > 10 * LEAD_S else 0.0


def _recording(lines: list[bytes]) -> Callable[[Mapping[str, object], StreamResult], None]:
    return lambda body, result: lines.append(line_of(body, result))


async def _run(plan: Plan, runner: Runner, began: float, report: Report | None, stop: Interruption) -> Ending:
    """Returns how it ended: saturated by a growing backlog, cut short by ``stop``, or whole."""
    running = asyncio.ensure_future(_loop(plan, runner, began))
    saturation = None
    if plan.stop_saturated and not isinstance(plan.load, Closed) and plan.load.rate:
        saturation = Saturation(plan.load.rate / plan.shard[1])
    try:
        while not (await asyncio.wait([running], timeout=EVERY_S))[0]:
            seconds = time.perf_counter() - began
            if report is not None:
                report(_progress(runner, seconds))
            grows = saturation is not None and seconds > 0 and saturation.add(seconds, runner.in_flight)
            if grows or stop.asked is not None:
                await runner.stop()
                running.cancel()
                await asyncio.wait([running])
                return "saturated" if grows else "cut short"
        await running
        return "whole"
    finally:
        running.cancel()
        await runner.stop()


async def _loop(plan: Plan, runner: Runner, began: float) -> None:
    if not isinstance(plan.load, Closed):
        await runner.open_loop(began)
        return
    await runner.timers.until(began)
    index, of = plan.shard
    clients = plan.load.clients // of + (index < plan.load.clients % of)
    numbers = range(index, 10**12 if plan.load.requests is None else plan.load.requests, of)
    await runner.closed_loop(clients, numbers, began, plan.load.seconds)


def _progress(runner: Runner, seconds: float) -> Progress:
    return Progress(seconds, runner.sent, runner.ended, runner.in_flight, sum(runner.lately))


def _spread(plan: Plan, processes: int, on_begin: Callable[[float], None], stop: Interruption) -> list[Part]:
    """Returns what ``processes`` see that begin together. They share this plan's shard among them, and end with a
    SIGTERM if ``stop`` is asked for."""
    context = multiprocessing.get_context("spawn")
    index, of = plan.shard
    started = []
    for number in range(processes):
        ours, theirs = context.Pipe()
        shard = replace(plan, shard=(index + of * number, of * processes))
        process = context.Process(target=_child, args=(shard, theirs), daemon=True)
        process.start()
        theirs.close()
        started.append((process, ours))
    try:
        for _, pipe in started:
            _received(pipe)
        start_at = time.time() + _ALL_READY_S if plan.start_at is None else plan.start_at
        on_begin(start_at)
        for _, pipe in started:
            pipe.send(start_at)
        with stop.heard(lambda: _terminate([process for process, _ in started])):
            return [_received(pipe) for _, pipe in started]
    finally:
        for process, _ in started:
            process.terminate()
            process.join()


def _terminate(processes: Sequence[BaseProcess]) -> None:
    for process in processes:
        process.terminate()


def _child(plan: Plan, pipe: Connection) -> None:
    def ready() -> float:
        pipe.send(None)
        return float(pipe.recv())

    try:
        with signals() as stop:
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it, too, and passes it on
            with stop.heard():
                part = on_loop(part_of(plan, ready=ready, stop=stop))
        pipe.send(part)
    except KeyboardInterrupt:
        return
    except Exception as error:  # noqa: BLE001 -- the parent raises it
        pipe.send(error)


def _received(pipe: Connection) -> Any:
    try:
        found = pipe.recv()
    except EOFError as error:
        raise ProcessLost("A process of the load generator was killed.", hint="Had it memory enough?") from error
    if isinstance(found, Exception):
        raise found
    return found
