"""Names of prefixes, for the prefix cache and for prefix-affine dispatch. Pure.

A name tells which tokens a prefix has and among whom it is shared: tenants that must not learn what others ask begin
at roots of their own, and whoever sends a ``cache_salt`` shares with those alone that send the same.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Literal

PrefixScope = Literal["tenant", "all"]
"""Among whom prefixes are shared: the requests of a tenant, or all."""

_NAME_BYTES = 16


def prefix_root(scope: PrefixScope, tenant: str, salt: str) -> bytes:
    """Name of the empty prefix: equal for requests that may share their prefixes, and for no others.

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
    """Names of all prefixes that are whole blocks of ``token_ids`` behind the prefix ``root``, shortest first.

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
    except OverflowError:  # no model knows such ids: the worker refuses them, the scheduler must live that long
        return array("q", (token_id & 0x7FFF_FFFF_FFFF_FFFF for token_id in token_ids))
