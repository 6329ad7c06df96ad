"""Reads the files of a trace folder (:mod:`services.runtime.tracing.folder`), and finds a request in them.

Lines are looked through as bytes, and only those that have the wanted id are decoded: a folder may have hundreds of MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

PATTERN = "*.jsonl"
_NAMES = ("expertmesh.request_id", "expertmesh.sequence", "gen_ai.response.id")
"""Attributes by which a request is found."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Moment:
    """An event of a span; times are in nanoseconds since 1970, by the clock of the span's process."""

    name: str
    at_ns: int
    attributes: dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Record:
    """A span. ``process`` is the name of the process that made it, ``instance`` no other process's."""

    trace_id: str
    span_id: str
    parent_id: str
    name: str
    start_ns: int
    end_ns: int
    process: str
    instance: str
    sample: float
    error: str | None = None
    attributes: dict[str, Any] = field(default_factory=dict)
    events: tuple[Moment, ...] = ()
    links: tuple[str, ...] = ()

    @property
    def thread(self) -> str | None:
        """The thread that an engine's slice is of; None for spans of requests."""
        return self.attributes.get("thread.name")


class TraceFolder:
    """The traces in ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def files(self) -> list[Path]:
        return sorted(self.path.glob(PATTERN))

    def traces_of(self, wanted: str) -> list[str]:
        """Return the ids of the traces that ``wanted`` names, oldest first: the id of a request, of an answer, of a
        sequence, or of a trace. Ids that clients choose may be the same for several requests."""
        found = {record.trace_id: record.start_ns for record in self._having(wanted) if _is(record, wanted)}
        return sorted(found, key=found.__getitem__)

    def trace(self, trace_id: str) -> list[Record]:
        """Return the spans of one trace in the order of their beginnings."""
        found = [record for record in self._having(trace_id) if record.trace_id == trace_id]
        return sorted(found, key=lambda record: (record.start_ns, -record.end_ns))

    def everything(self) -> Iterator[Record]:
        """Yield all spans, steps of engines included."""
        for line in self._lines():
            yield from records_of(line)

    def share(self) -> float | None:
        """Return the share of requests that are traced; None where that cannot be known."""
        shares = [record.sample for file in self.files for record in _first(file)]
        return min(shares, default=None)

    def _having(self, wanted: str) -> Iterator[Record]:
        needle = wanted.encode()
        for line in self._lines():
            if needle in line:
                yield from records_of(line)

    def _lines(self) -> Iterator[bytes]:
        for file in self.files:
            with file.open("rb") as lines:
                yield from lines


def records_of(line: bytes) -> Iterator[Record]:
    """Yield the spans of one line. One that a killed process has not finished has none."""
    try:
        parts = msgspec.json.decode(line)["resourceSpans"]
    except (msgspec.DecodeError, UnicodeDecodeError, KeyError, TypeError):
        return
    for part in parts:
        resource = _attributes(part["resource"].get("attributes", ()))
        for scope in part["scopeSpans"]:
            yield from (_record(span, resource) for span in scope["spans"])


def _record(span: dict[str, Any], resource: dict[str, Any]) -> Record:
    status = span.get("status", {})
    name = str(resource.get("expertmesh.process", resource.get("service.name", "unknown")))
    return Record(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        name=span["name"],
        start_ns=int(span["startTimeUnixNano"]),
        end_ns=int(span["endTimeUnixNano"]),
        process=name,
        instance=str(resource.get("service.instance.id", name)),
        sample=float(resource.get("expertmesh.trace_sample", 1.0)),
        error=status.get("message", "failed") if status.get("code") == 2 else None,
        attributes=_attributes(span.get("attributes", ())),
        events=tuple(
            Moment(
                name=event["name"],
                at_ns=int(event["timeUnixNano"]),
                attributes=_attributes(event.get("attributes", ())),
            )
            for event in span.get("events", ())
        ),
        links=tuple(link["spanId"] for link in span.get("links", ())),
    )


def _attributes(pairs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair["value"]) for pair in pairs}


def _value(value: dict[str, Any]) -> Any:
    ((kind, content),) = value.items()
    if kind == "arrayValue":
        return [_value(each) for each in content.get("values", ())]
    return int(content) if kind == "intValue" else content


def _is(record: Record, wanted: str) -> bool:
    names = [str(record.attributes.get(name, "")) for name in _NAMES]
    return wanted in (record.trace_id, *names) or any(name.endswith(f"-{wanted}") for name in names)


def _first(file: Path) -> list[Record]:
    with file.open("rb") as lines:
        return next((found for line in lines if (found := list(records_of(line)))), [])[:1]
