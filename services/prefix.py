"""Hash chains over token blocks: the name of a prefix, shared by the prefix cache and prefix-affine dispatch."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

ROOT = b"expertmesh-prefix"


def block_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of the prefix that ends with ``token_ids`` and continues ``parent``: 16 bytes, collision-safe.

    A cryptographic hash, because a collision would hand one client's context to another.
    """
    return hashlib.blake2b(parent + repr(tuple(token_ids)).encode(), digest_size=16).digest()


def prefix_chain(token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
    """Names of all prefixes of ``token_ids`` that are whole blocks, shortest first.

    >>> len(list(prefix_chain(range(33), 16)))
    2
    """
    parent = ROOT
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = block_hash(parent, token_ids[start : start + block_size])
        yield parent
