"""Room for so much of something at a time, of which one tenant has a part at most: bytes of bodies, requests."""

from __future__ import annotations

from collections.abc import Callable
from types import TracebackType

from services.errors import Overloaded, WorkLimited

_RETRY_S = 1.0


class Room:
    """``total`` of ``what``, and ``share`` of it for one tenant. ``tell`` hears how much is taken, as it changes."""

    def __init__(self, what: str, total: int, share: int, tell: Callable[[float], None]) -> None:
        self._what = what
        self._total = total
        self._share = share
        self._tell = tell
        self._held: dict[str, int] = {}
        self._sum = 0

    def open(self, tenant: str) -> Hold:
        """Nothing yet, for ``tenant``; what it takes is given back as it closes."""
        return Hold(self, tenant)

    def take(self, tenant: str, amount: int) -> None:
        """Raises WorkLimited where that is more than the tenant's share, Overloaded where it is more than there is."""
        held = self._held.get(tenant, 0)
        if held + amount > self._share:
            raise WorkLimited(
                f"This key has {held} {self._what} under way here; {self._share} are the most.",
                hint="Send fewer at a time.",
                retry_after_s=_RETRY_S,
            )
        if self._sum + amount > self._total:
            raise Overloaded(
                f"There are {self._sum} {self._what} under way here; {self._total} are the most.",
                hint="Try again soon.",
                retry_after_s=_RETRY_S,
            )
        self._change(tenant, amount)

    def give_back(self, tenant: str, amount: int) -> None:
        self._change(tenant, -amount)

    def _change(self, tenant: str, amount: int) -> None:
        self._sum += amount
        left = self._held.pop(tenant, 0) + amount
        if left:
            self._held[tenant] = left
        self._tell(self._sum)


class Hold:
    """A part of a room that grows while it is open."""

    def __init__(self, room: Room, tenant: str) -> None:
        self._room = room
        self._tenant = tenant
        self._amount = 0

    def grow(self, amount: int) -> None:
        """Holds ``amount`` in all, if it did not already. Raises as :meth:`Room.take`."""
        if amount > self._amount:
            self._room.take(self._tenant, amount - self._amount)
            self._amount = amount

    def __enter__(self) -> Hold:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._amount:
            self._room.give_back(self._tenant, self._amount)
            self._amount = 0
