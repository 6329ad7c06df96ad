"""Names of prefixes, for the prefix cache and for prefix-affine dispatch. Pure.

A name stands for the tokens of a prefix and for who shares it. Tenants that must not learn what others ask begin at
roots of their own; requests with a ``cache_salt`` share prefixes only with requests that have the same salt.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

PrefixScope = Literal["tenant", "all"]
"""Which requests share prefixes: those of one tenant, or all."""

_NAME_BYTES = 16


def prefix_root(scope: PrefixScope, tenant: str, salt: str) -> bytes:
    """Return the name of the empty prefix: equal for requests that may share their prefixes, and for no others.

    >>> prefix_root("all", "alice", "") == prefix_root("all", "bob", "")
    True
    >>> prefix_root("tenant", "a", "bc") == prefix_root("tenant", "ab", "c")
    False
    """
    root = hashlib.blake2b(digest_size=_NAME_BYTES, person=b"expertmesh-root")
    for party in (tenant if scope == "tenant" else "", salt):
        data = party.encode()
        root.update(len(data).to_bytes(8, "little") + data)
    return root.digest()


def prefix_chain(token_ids: Sequence[int], block_size: int, root: bytes) -> Iterator[bytes]:
    """Yield names of all prefixes that are whole blocks of ``token_ids`` behind the prefix ``root``, shortest first.

    A name is a cryptographic hash, because a collision would hand one client's context to another.

    >>> len(list(prefix_chain(range(33), 16, prefix_root("all", "", ""))))
    2
    """
    words = _packed(token_ids)
    width = block_size * words.itemsize
    data = words.tobytes()
    parent = root
    for start in range(0, len(data) - width + 1, width):
        parent = hashlib.blake2b(parent + data[start : start + width], digest_size=_NAME_BYTES).digest()
        yield parent


def _packed(token_ids: Sequence[int]) -> array[int]:
    try:
        return array("i", token_ids)
    except OverflowError:  # no model has such ids; the worker will refuse them, the scheduler must get that far
        return array("q", (token_id & 0x7FFF_FFFF_FFFF_FFFF for token_id in token_ids))
