"""Turns spans into Chrome's trace event format, which Perfetto draws: the times of all tasks on all processes and GPUs
in one picture (ExpertFlow, section 3.6). In: spans. Out: one JSON object.

A process is a track with a thread for each thread that makes steps; steps are slices there, with a counter of their
tokens. What belongs to a request is an asynchronous slice of its process, with one row for each attempt.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

from services.cli.trace.files import Record

_COUNTERS = {"expertmesh.step.tokens": "tokens of a step", "expertmesh.step.sequences": "sequences of a step"}
_ATTEMPT = "attempt"
Event = dict[str, Any]


def timeline(spans: Iterable[Record]) -> dict[str, Any]:
    """Return ``spans`` as a trace. Its times are in microseconds since the first of them began."""
    spans = sorted(spans, key=lambda span: (span.start_ns, -span.end_ns))
    start_ns = spans[0].start_ns if spans else 0
    tracks = _Tracks()
    rows = _rows(spans)
    events = [event for span in spans for event in _events(span, start_ns, tracks, rows)]
    return {"displayTimeUnit": "ms", "traceEvents": [*tracks.named(), *events]}


class _Tracks:
    """Numbers for processes and their threads: those of the operating system may be the same on two hosts."""

    def __init__(self) -> None:
        self._processes: dict[str, tuple[int, str]] = {}
        self._threads: dict[tuple[int, str], int] = {}

    def process(self, span: Record) -> int:
        return self._processes.setdefault(span.instance, (len(self._processes) + 1, span.process))[0]

    def thread(self, process: int, name: str) -> int:
        return self._threads.setdefault((process, name), len(self._threads) + 1)

    def named(self) -> Iterator[Event]:
        for number, name in self._processes.values():
            yield {"ph": "M", "name": "process_name", "pid": number, "args": {"name": name}}
        for (process, name), number in self._threads.items():
            yield {"ph": "M", "name": "thread_name", "pid": process, "tid": number, "args": {"name": name}}


def _rows(spans: Iterable[Record]) -> dict[str, str]:
    """Return the row of each span: that of the attempt that it is within, or of its trace."""
    rows: dict[str, str] = {}
    for span in spans:
        own = span.span_id if span.name == _ATTEMPT else span.trace_id
        rows[span.span_id] = own if span.name == _ATTEMPT else rows.get(span.parent_id, own)
    return rows


def _events(span: Record, start_ns: int, tracks: _Tracks, rows: dict[str, str]) -> Iterator[Event]:
    process, began = tracks.process(span), (span.start_ns - start_ns) / 1e3
    if (thread := span.thread) is None:
        common = {"cat": "request", "id": rows[span.span_id], "pid": process, "name": span.name}
        yield common | {"ph": "b", "ts": began, "args": _arguments(span)}
        for moment in span.events:
            at = (moment.at_ns - start_ns) / 1e3
            yield common | {"ph": "n", "ts": at, "name": moment.name, "args": moment.attributes}
        yield common | {"ph": "e", "ts": (span.end_ns - start_ns) / 1e3}
        return
    duration = (span.end_ns - span.start_ns) / 1e3
    slot = {"pid": process, "tid": tracks.thread(process, thread)}
    yield {"ph": "X", "name": span.name, "ts": began, "dur": duration, "args": _arguments(span)} | slot
    for name, shown in _COUNTERS.items():
        if name in span.attributes:
            yield {"ph": "C", "name": shown, "pid": process, "ts": began, "args": {"value": span.attributes[name]}}


def _arguments(span: Record) -> dict[str, Any]:
    error = {"error": span.error} if span.error else {}
    return {"trace": span.trace_id, **span.attributes, **error}
