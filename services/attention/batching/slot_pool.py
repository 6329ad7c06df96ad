"""Slots that are held by a number of owners, and found by a name while nobody holds them. Pure Python."""

from __future__ import annotations

from services.attention.batching.blocks import BlockPool


class SlotPool:
    """``count`` slots, numbered from 0: a :class:`BlockPool` whose blocks are looked up one by one."""

    def __init__(self, count: int) -> None:
        self._blocks = BlockPool(count, 1)

    @property
    def available(self) -> int:
        return self._blocks.available

    @property
    def cached(self) -> int:
        return self._blocks.cached

    def take(self) -> int:
        """Return a slot, held by one owner. Its name, if it has one, is forgotten."""
        [slot] = self._blocks.take((), 1)
        return slot

    def hold(self, slot: int) -> None:
        """Add an owner."""
        self._blocks.take((slot,), 0)

    def release(self, slot: int) -> None:
        """Take an owner away. A slot with a name is found until it is taken."""
        self._blocks.release((slot,))

    def name(self, slot: int, name: bytes) -> None:
        """Let ``name`` find ``slot``, unless it finds another one."""
        self._blocks.publish(slot, name)

    def find(self, name: bytes) -> int | None:
        found = self._blocks.match((name,))
        return found[0] if found else None

    def forget(self, name: bytes) -> None:
        """Let ``name`` find no slot that nobody holds."""
        if (slot := self.find(name)) is not None:
            self._blocks.forget((slot,))
