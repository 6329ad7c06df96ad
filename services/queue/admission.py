"""What admission refuses, as errors, and a tenant's limits, as script arguments."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from services.errors import MAX_RETRY_AFTER_S, ConcurrencyLimited, QueueFull, RateLimited, TooManyRequests
from services.queue.limits import TenantLimits


def tenant_arguments(limits: TenantLimits | None) -> tuple[int, float, int]:
    """(concurrency, ms between requests, burst) with -1 and 0 for no limit, as ``admission.lua`` reads them."""
    if limits is None:
        return -1, 0.0, 0
    concurrency = -1 if limits.concurrency is None else limits.concurrency
    if limits.requests_per_minute is None:
        return concurrency, 0.0, 0
    burst = limits.burst if limits.burst is not None else max(1, round(limits.requests_per_minute))
    return concurrency, 60_000 / limits.requests_per_minute, burst


def raise_refusal(reply: Sequence[Any], requests: int) -> None:
    """Raises what ``reply`` ({bound, wait in ms, count} of ``admission.lua``) says; returns if it begins with 'ok'."""
    if reply[0] == b"ok":
        return
    bound, wait_ms, count = reply
    retry_after_s = float(min(max(1, -(-wait_ms // 1000)), MAX_RETRY_AFTER_S))
    raise _refusal(bound.decode(), count, requests, retry_after_s)


def _refusal(bound: str, count: int, requests: int, retry_after_s: float) -> TooManyRequests:
    wait = f"Retry in {retry_after_s:.0f} s."
    match bound:
        case "requests":
            text = f"{count} requests wait already and {requests} more would be too many."
            return QueueFull(text, hint=wait, retry_after_s=retry_after_s)
        case "tokens":
            return QueueFull(f"{count} tokens wait already.", hint=wait, retry_after_s=retry_after_s)
        case "concurrency":
            text = f"This key has {count} sequences under way and may not add {requests}."
            return ConcurrencyLimited(text, hint=wait, retry_after_s=retry_after_s)
        case _:
            text = "This key sends more requests per minute than it may."
            return RateLimited(text, hint=wait, retry_after_s=retry_after_s)
