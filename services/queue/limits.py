"""Bounds and lifetimes of what the queue keeps in Redis, in one value that every side gets.

All processes of a namespace should use equal values. Each script call applies its caller's values, so a difference
makes bounds uneven and breaks nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.config import QueueSettings


@dataclass(frozen=True, kw_only=True, slots=True)
class TenantLimits:
    """What one API key may do. None switches a limit off."""

    concurrency: int | None = None
    """Requests admitted and not ended."""
    requests_per_minute: float | None = None
    burst: int | None = None
    """Requests that may come at once before the rate applies; None: as many as ``requests_per_minute``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class QueueLimits:
    """Bounds of the queue. Counts are whole requests or tokens (prompt + max_tokens), times are seconds."""

    max_requests: int = 1024
    """Queued requests: admitted and not claimed."""
    max_tokens: int = 4_000_000
    """Queued tokens; a request larger than this is never admitted."""
    quantum: int = 1024
    """Tokens that a tenant may start per round of deficit round-robin."""
    refund_quanta: int = 4
    """A refund of unused tokens lifts a tenant's deficit to at most this many quanta."""
    lease_s: float = 6.0
    max_attempts: int = 8
    max_stuck: int = 3
    """A request is dead-lettered before ``max_attempts`` after this many lost attempts in a row without a new token
    (from the second on: without tokens of two steps)."""
    tombstone_s: float = 30.0
    """How long an ended request is remembered, to refuse late results."""
    lost_s: float = 60.0
    """How long a lost attempt waits to be resubmitted before the request is given up."""
    record_grace_s: float = 3600.0
    """A live record expires this long after its deadline unless a worker keeps renewing its lease."""
    idempotency_s: float = 3600.0
    """How long an Idempotency-Key is remembered."""
    max_idempotency_keys: int = 10_000
    """Bound keys of one tenant; beyond it the key that would end first is forgotten."""
    max_all_idempotency_keys: int = 100_000
    """Bound keys of all tenants together: about 80 MB."""
    stream_entries: int = 16_384
    """Entries kept in a result stream or an inbox that nobody reads."""
    stream_bytes: int = 32 * 1024 * 1024
    """Memory of such a stream."""
    lag_s: float = 0.2
    lag_bytes: int = 512 * 1024
    """A gateway lags, and workers wait for it, while its stream takes more than ``lag_bytes`` and holds an entry that
    has waited for longer than ``lag_s``. It reports what it has handled after each fourth of ``lag_bytes``."""
    stream_s: float = 600.0
    """A stream and a worker's keys expire when nobody has written or renewed for this long."""
    max_dead_letters: int = 256
    dead_letter_bytes: int = 32 * 1024 * 1024
    """Memory of all dead letters; the newest always stays."""
    dead_letter_s: float = 7 * 86_400.0
    max_unreadable: int = 64
    """Unreadable messages that are kept."""

    @classmethod
    def of(cls, settings: QueueSettings) -> QueueLimits:
        """Returns the limits that ``settings`` ask for."""
        return cls(
            max_requests=settings.max_queued_requests,
            max_tokens=settings.max_queued_tokens,
            lease_s=settings.lease,
            max_attempts=settings.max_attempts,
            tombstone_s=5 * settings.lease,
            lost_s=max(10 * settings.lease, 30.0),
        )
