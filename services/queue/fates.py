"""What the queue made of requests whose members are gone: from the scripts that found it out, into the log.

A scheduler that reaps, and a supervisor that reports a dead process, get this from `life.lua`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from services.request_ids import about

_LINES = {
    "lost": "lost an attempt: its worker is gone",
    "dead": "ended a request: too many attempts failed; see `expertmesh queue`",
    "abandoned": "ended a request: its gateway did not resubmit it",
    "expired": "ended a request: its deadline passed in the queue",
    "cancelled": "ended a request: its gateway is gone",
}

log = logging.getLogger(__name__)


class Fate(NamedTuple):
    """What became of a request of ``tenant``, and which attempt that ended. ``worker`` ran it; empty where none did."""

    outcome: str
    request_id: str
    attempt: int
    worker: str
    tenant: str


def fates_of(reply: Sequence[Any]) -> Iterator[Fate]:
    """Yields the fates that a script reports, five values for each."""
    for outcome, request_id, attempt, worker, tenant in zip(*(reply[part::5] for part in range(5)), strict=True):
        yield Fate(
            outcome.decode(), request_id.decode(), int(attempt), worker.decode(), tenant.decode(errors="replace")
        )


def log_fates(fates: Iterable[Fate]) -> None:
    """Logs a line for each."""
    for fate in fates:
        worker = {"worker": fate.worker} if fate.worker else {}
        log.info(_LINES[fate.outcome], extra={**about(fate.request_id, fate.attempt, fate.tenant), **worker})
