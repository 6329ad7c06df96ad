"""The context of a span as it crosses processes: W3C's ``traceparent``, and 24 bytes in frames. No OpenTelemetry.

https://www.w3.org/TR/trace-context/ says what the header holds: version, trace id, id of the parent span, flags.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_HEADER = re.compile(r"([0-9a-f]{2})-([0-9a-f]{32})-([0-9a-f]{16})-([0-9a-f]{2})(-.*)?")
_SAMPLED = 0x01
_MAX_STATE, _MAX_MEMBERS = 512, 32
"""Characters and members of a tracestate that have to be passed on; longer ones are dropped."""
_KEY = r"[a-z][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13}"
_MEMBER = re.compile(rf"(?:{_KEY})=[ -+\--<>-~]{{0,255}}[!-+\--<>-~]")
_TRACE_BYTES, _SPAN_BYTES = 16, 8


@dataclass(frozen=True, slots=True)
class TraceContext:
    """A span of a trace. ``state`` is the client's ``tracestate``, passed on as it came."""

    trace_id: int
    span_id: int
    sampled: bool = True
    state: str = ""

    @classmethod
    def parse(cls, traceparent: str, tracestate: str = "") -> TraceContext | None:
        """Return the context that the headers name; None where ``traceparent`` is none, as if it had not come."""
        found = _HEADER.fullmatch(traceparent.strip())
        if found is None:
            return None
        version, trace, span, flags, more = found.groups()
        if version == "ff" or (version == "00" and more) or not int(trace, 16) or not int(span, 16):
            return None
        return cls(int(trace, 16), int(span, 16), bool(int(flags, 16) & _SAMPLED), _usable(tracestate))

    @property
    def traceparent(self) -> str:
        return f"00-{self.trace_hex}-{self.span_id:016x}-{_SAMPLED if self.sampled else 0:02x}"

    @property
    def trace_hex(self) -> str:
        """The trace's id as people read it."""
        return f"{self.trace_id:032x}"

    def packed(self) -> bytes:
        """Return trace and span as bytes, for frames, which carry contexts of sampled spans alone."""
        return self.trace_id.to_bytes(_TRACE_BYTES, "big") + self.span_id.to_bytes(_SPAN_BYTES, "big")

    @classmethod
    def unpack(cls, data: bytes) -> TraceContext | None:
        """Return the sampled context that ``data`` holds; None where it holds none."""
        trace, span = int.from_bytes(data[:_TRACE_BYTES], "big"), int.from_bytes(data[_TRACE_BYTES:], "big")
        return cls(trace, span) if len(data) == _TRACE_BYTES + _SPAN_BYTES and trace and span else None


def _usable(tracestate: str) -> str:
    """Return ``tracestate``, or "" where it is malformed: OpenTelemetry would log what it cannot read for each span."""
    members = [member.strip() for member in tracestate.split(",") if member.strip()]
    fine = len(tracestate) <= _MAX_STATE and len(members) <= _MAX_MEMBERS and all(map(_MEMBER.fullmatch, members))
    return ",".join(members) if fine else ""
