"""Versions of the fabric's protocol: those that a release speaks, and the one that two releases speak together.

The frames of a handshake are of version 1 in every release. In it each side signs which versions it speaks. Everything
later on the connection (frames, lanes, shared memory) is of the highest common version. A release that changes the
meaning of a frame speaks the version before as well, so that both halves of an upgrade serve together.
"""

from __future__ import annotations

from dataclasses import dataclass

HANDSHAKE = 1
"""Version of a handshake's frames and signatures, in every release."""


@dataclass(frozen=True, slots=True)
class Versions:
    """The versions that a release speaks: from ``oldest`` to ``newest``."""

    oldest: int
    newest: int

    def common(self, other: Versions) -> int | None:
        """Return the highest version that both speak; None if there is none."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        return f"version {self.newest}" if self.oldest == self.newest else f"versions {self.oldest} to {self.newest}"


SPOKEN = Versions(oldest=1, newest=1)
"""The versions of this release. The kinds of lanes (``nccl/2``) and of memory handles never change: changes of their
use follow the connection's version, too."""
