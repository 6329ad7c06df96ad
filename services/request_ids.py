"""The ids of a request, each of which begins with the one before it, so that a search for any of them finds all lines.

    request id    slow-1                    of the client's X-Request-Id, or made by the gateway
    base          slow-1.126f1c24           of the job; an answer is called cmpl-<base> or chatcmpl-<base>
    sequence      slow-1.126f1c24-0         of each choice of each prompt; schedulers, workers and Redis know this one

Clients choose request ids, so they may be the same for several requests; a base has 32 random digits behind it. Where
the gateway makes the request id it is the base. In: text of clients. Out: letters, digits and ``._:-`` alone.
"""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

MAX_REQUEST_ID = 64
"""Longer ids of clients are cut: a sequence's id goes with each of its tokens through Redis."""
_UNSAFE = re.compile(r"[^A-Za-z0-9._:-]")


@dataclass(frozen=True, slots=True)
class RequestIds:
    """The ids of one HTTP request. ``base`` is for the job that it begins, if it begins one."""

    request_id: str
    base: str

    @classmethod
    def of(cls, given: str) -> RequestIds:
        """Return the ids of a request whose X-Request-Id is ``given``, without characters that could break a log."""
        fresh = uuid.uuid4().hex
        safe = _UNSAFE.sub("", given)[:MAX_REQUEST_ID]
        return cls(safe, f"{safe}.{fresh}") if safe else cls(fresh, fresh)


def sequence_id(base: str, number: int) -> str:
    """Return the id of sequence ``number`` of the job ``base``."""
    return f"{base}-{number}"


def request_id_of(sequence: str) -> str:
    """Return the request id with which the id of a sequence begins."""
    base = sequence.rpartition("-")[0] or sequence
    return base.rpartition(".")[0] or base


def about(
    sequence: str, attempt: int | None = None, tenant: str | None = None, *, traceparent: str = ""
) -> dict[str, object]:
    """Return the fields of a log line about a sequence of ``tenant``, or about one attempt of it, for ``extra``.
    ``traceparent`` is that of its request."""
    fields: dict[str, object] = {"request_id": request_id_of(sequence), "sequence": sequence}
    if traceparent:
        fields["trace_id"] = traceparent[3:35]  # version 00 of W3C's format: 00-<trace>-<span>-<flags>
    if attempt is not None:
        fields["attempt"] = attempt
    return fields | ({"tenant": tenant} if tenant else {})
