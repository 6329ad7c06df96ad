"""Idempotency-Keys as Redis binds them, in the same step as the request that they stand for is admitted."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

from services.errors import Conflict
from services.queue.scripts import Argument


@dataclass(frozen=True, kw_only=True, slots=True)
class IdempotencyKey:
    """A client's ``key``, and what it is to stand for: a body with this ``fingerprint``, ids from ``base_id``, draws
    from ``seed``."""

    key: str
    fingerprint: str
    base_id: str
    seed: int


class KeyBound(Exception):
    """The key stands for a request already; nothing was admitted. ``owner`` is the gateway that used it before."""

    def __init__(self, *, base_id: str, seed: int, owner: str) -> None:
        super().__init__(base_id)
        self.base_id, self.seed, self.owner = base_id, seed, owner


def binding(tenant: str, key: IdempotencyKey | None) -> tuple[Argument, ...]:
    """``key`` of ``tenant`` as ``admit.lua`` takes it."""
    if key is None:
        return "", "", "", 0
    hashed = hashlib.sha256(key.key.encode()).hexdigest()
    return f"{tenant}:{hashed}", key.fingerprint, key.base_id, key.seed


def bound_already(
    key: IdempotencyKey | None, fingerprint: bytes, base_id: bytes, seed: bytes, owner: bytes
) -> Exception:
    """What to raise where the key stands for something: for this body, or for another."""
    assert key is not None
    if fingerprint.decode() != key.fingerprint:
        return Conflict("The Idempotency-Key was used with another body.", hint="Use a new key for a new request.")
    return KeyBound(base_id=base_id.decode(), seed=int(seed), owner=owner.decode())
