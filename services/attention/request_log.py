"""An attention worker's log lines about requests, each with the ids of its sequence and the number of its attempt.

A request that goes well has lines at debug alone, when it starts and when it ends: there may be thousands a second. A
request that fails, or an attempt that ends without an end of its request, has a line at info. No token has one.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from services.messages import GenerateRequest, TokenEvent
from services.request_ids import about

log = logging.getLogger(__name__)


def log_start(request: GenerateRequest) -> None:
    """Log that an attempt begins."""
    if log.isEnabledFor(logging.DEBUG):
        counts = {"prompt_tokens": request.prompt_len, "delivered": request.delivered, "queue_ms": request.queued_ms}
        ids = about(request.id, request.attempt, request.tenant, traceparent=request.traceparent)
        log.debug("started", extra={**ids, **counts})


def log_end(event: TokenEvent, tenant: str | None = None) -> None:
    """Log the end of a request of ``tenant``, which ``event`` brings."""
    level = logging.DEBUG if event.error is None else logging.INFO
    if log.isEnabledFor(level):
        ended = {"finish": event.finish, "completion_tokens": event.index + (event.token_id is not None)}
        error = {"error": event.error.code, "why": event.error.message} if event.error else {}
        log.log(level, "ended", extra={**about(event.request_id, event.attempt, tenant), **ended, **error})


def log_attempts(
    what: str, attempts: Mapping[str, int], level: int = logging.INFO, *, tenants: Mapping[str, str] | None = None
) -> None:
    """Log ``what`` of each of ``attempts`` (sequence -> attempt); ``tenants`` has their tenants, where known."""
    if log.isEnabledFor(level):
        for sequence, attempt in attempts.items():
            log.log(level, what, extra=about(sequence, attempt, (tenants or {}).get(sequence)))
