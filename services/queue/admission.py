"""Admission between Python and Lua: a tenant's limits and an Idempotency-Key go in as script arguments, refusals come
out as errors. Redis binds a key in the same step that admits its request.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from services.errors import MAX_RETRY_AFTER_S, ConcurrencyLimited, Conflict, QueueFull, RateLimited, TooManyRequests
from services.queue.limits import TenantLimits
from services.queue.scripts import Argument


def tenant_arguments(limits: TenantLimits | None) -> tuple[int, float, int]:
    """Returns (concurrency, ms between requests, burst) for ``admission.lua``; -1 and 0 stand for no limit."""
    if limits is None:
        return -1, 0.0, 0
    concurrency = -1 if limits.concurrency is None else limits.concurrency
    if limits.requests_per_minute is None:
        return concurrency, 0.0, 0
    burst = limits.burst if limits.burst is not None else max(1, round(limits.requests_per_minute))
    return concurrency, 60_000 / limits.requests_per_minute, burst


def raise_refusal(reply: Sequence[Any], requests: int) -> None:
    """Raises the error for ``reply`` ({bound, wait in ms, count} of ``admission.lua``), unless it begins with 'ok'."""
    if reply[0] == b"ok":
        return
    bound, wait_ms, count = reply
    retry_after_s = float(min(max(1, -(-wait_ms // 1000)), MAX_RETRY_AFTER_S))
    kinds: dict[bytes, tuple[type[TooManyRequests], str]] = {
        b"requests": (QueueFull, f"{count} requests wait already and {requests} more would be too many."),
        b"tokens": (QueueFull, f"{count} tokens wait already."),
        b"concurrency": (ConcurrencyLimited, f"This key has {count} sequences under way and may not add {requests}."),
        b"rate": (RateLimited, "This key sends more requests per minute than it may."),
    }
    kind, text = kinds[bound]
    raise kind(text, hint=f"Retry in {retry_after_s:.0f} s.", retry_after_s=retry_after_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotencyKey:
    """A client's ``key``, and the request to bind it to: a body with ``fingerprint``, ids that derive from ``base_id``,
    draws from ``seed``."""

    key: str
    fingerprint: str
    base_id: str
    seed: int


class KeyBound(Exception):
    """The key is bound to a request already; nothing was admitted. ``owner`` is the gateway that used it before."""

    def __init__(self, *, base_id: str, seed: int, owner: str) -> None:
        super().__init__(base_id)
        self.base_id, self.seed, self.owner = base_id, seed, owner


def binding(tenant: str, key: IdempotencyKey | None) -> tuple[Argument, ...]:
    """Returns the arguments of ``admit.lua`` that bind ``key`` for ``tenant``."""
    if key is None:
        return "", "", "", 0
    hashed = hashlib.sha256(key.key.encode()).hexdigest()
    return f"{tenant}:{hashed}", key.fingerprint, key.base_id, key.seed


def bound_already(
    key: IdempotencyKey | None, fingerprint: bytes, base_id: bytes, seed: bytes, owner: bytes
) -> Exception:
    """Returns the error to raise where ``key`` is bound: KeyBound for the same body, Conflict for another one."""
    assert key is not None
    if fingerprint.decode() != key.fingerprint:
        return Conflict("The Idempotency-Key was used with a different body.", hint="Use a new key for a new request.")
    return KeyBound(base_id=base_id.decode(), seed=int(seed), owner=owner.decode())
