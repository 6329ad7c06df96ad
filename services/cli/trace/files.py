"""Reads the files of a trace folder (:mod:`services.runtime.tracing.folder`), and finds a request in them.

Lines are looked through as bytes, and only those that have the wanted id are decoded: a folder may have hundreds of MB.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from services.errors import ExpertMeshError

PATTERNS = ("*.jsonl", "*.json")
"""Files that gateways and workers write, and those that a collector's file exporter may be configured to write."""
_FAILED = (2, "STATUS_CODE_ERROR")
"""The status of a failed span, by its number or by its name."""
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
        return sorted(file for pattern in PATTERNS for file in self.path.glob(pattern))

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
            yield from line.records()

    def share(self) -> float | None:
        """Return the share of requests that are traced; None where that cannot be known."""
        shares = [record.sample for file in self.files for record in _first(file)]
        return min(shares, default=None)

    def _having(self, wanted: str) -> Iterator[Record]:
        needle = wanted.encode()
        for line in self._lines():
            if needle in line.text:
                yield from line.records()

    def _lines(self) -> Iterator[Line]:
        for file in self.files:
            yield from _lines_of(file)


class Line(NamedTuple):
    """One line of a file."""

    text: bytes
    file: Path
    number: int

    def records(self) -> Iterator[Record]:
        """Yield its spans. One that a killed process has not finished has none, and one of metrics or logs neither.

        Raises:
            NotOtlp: it has spans, which are not as OTLP writes them.
        """
        try:
            decoded = msgspec.json.decode(self.text)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return
        parts = decoded.get("resourceSpans") if isinstance(decoded, dict) else None
        try:
            for part in parts or ():
                resource = _attributes(part.get("resource", {}).get("attributes", ()))
                for scope in part.get("scopeSpans", ()):
                    yield from (_record(span, resource) for span in scope.get("spans", ()))
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise NotOtlp(self.file, self.number) from error


class NotOtlp(ExpertMeshError):
    """A file has spans in a form that OTLP does not have."""

    def __init__(self, file: Path, number: int) -> None:
        super().__init__(
            f"Line {number} of {file} has spans that are not in OTLP's JSON.",
            hint="Give a folder that --trace-folder filled, or a collector's file exporter with the format json.",
        )


def _lines_of(file: Path) -> Iterator[Line]:
    with file.open("rb") as lines:
        yield from (Line(text, file, number) for number, text in enumerate(lines, 1))


def _record(span: dict[str, Any], resource: dict[str, Any]) -> Record:
    """Fields that have their default, such as a span's empty name, may be left out of JSON."""
    status = span.get("status") or {}
    name = str(resource.get("expertmesh.process", resource.get("service.name", "unknown")))
    start_ns = int(span["startTimeUnixNano"])
    return Record(
        trace_id=span["traceId"],
        span_id=span["spanId"],
        parent_id=span.get("parentSpanId", ""),
        name=span.get("name", ""),
        start_ns=start_ns,
        end_ns=max(start_ns, int(span.get("endTimeUnixNano", 0))),
        process=name,
        instance=str(resource.get("service.instance.id", name)),
        sample=float(resource.get("expertmesh.trace_sample", 1.0)),
        error=status.get("message") or "failed" if status.get("code") in _FAILED else None,
        attributes=_attributes(span.get("attributes", ())),
        events=tuple(
            Moment(
                name=event.get("name", ""),
                at_ns=int(event.get("timeUnixNano", start_ns)),
                attributes=_attributes(event.get("attributes", ())),
            )
            for event in span.get("events", ())
        ),
        links=tuple(link["spanId"] for link in span.get("links", ())),
    )


def _attributes(pairs: Iterable[dict[str, Any]]) -> dict[str, Any]:
    return {pair["key"]: _value(pair.get("value", {})) for pair in pairs}


def _value(value: dict[str, Any]) -> Any:
    """An empty value is none of the kinds."""
    for kind, content in value.items():
        match kind:
            case "intValue":
                return int(content)
            case "arrayValue":
                return [_value(each) for each in content.get("values", ())]
            case "kvlistValue":
                return _attributes(content.get("values", ()))
            case _:
                return content
    return None


def _is(record: Record, wanted: str) -> bool:
    names = [str(record.attributes.get(name, "")) for name in _NAMES]
    return wanted in (record.trace_id, *names) or any(name.endswith(f"-{wanted}") for name in names)


def _first(file: Path) -> list[Record]:
    return next((found for line in _lines_of(file) if (found := list(line.records()))), [])[:1]
