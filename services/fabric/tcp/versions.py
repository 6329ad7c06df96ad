"""Versions of the fabric's protocol: what a release speaks, and what two releases speak with each other.

The frames of a handshake are of version 1 in every release. In it each side signs which versions it speaks, and all
that follows on the connection, frames, lanes and shared memory, is of the highest that both do. A release that changes
what a frame means speaks the version before as well, so that the halves of an upgrade go on with each other.
"""

from __future__ import annotations

from dataclasses import dataclass

HANDSHAKE = 1
"""Of a handshake's frames and signatures, in every release."""


@dataclass(frozen=True, slots=True)
class Versions:
    oldest: int
    newest: int

    def common(self, other: Versions) -> int | None:
        """The highest that both speak."""
        newest = min(self.newest, other.newest)
        return newest if newest >= max(self.oldest, other.oldest) else None

    def __str__(self) -> str:
        return f"version {self.newest}" if self.oldest == self.newest else f"versions {self.oldest} to {self.newest}"


SPOKEN = Versions(oldest=1, newest=1)
"""By this release. Lanes and tickets to memory have kinds of their own (``nccl/2``), which stay as they are: what
changes in their use goes by the connection's version, too."""
