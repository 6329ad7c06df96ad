"""How many groups were asked for, against how many there are."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from services.queue.seats import SeatState
from services.routing import ShardGroup

log = logging.getLogger(__name__)


class AskedGroups:
    """Says once of each layout of another size that it is not what --expert-groups asks for (None: nothing)."""

    def __init__(self, asked: int | None) -> None:
        self._asked = asked
        self._said: set[int] = set()

    def note(self, seats: Sequence[SeatState], layout: Sequence[ShardGroup]) -> None:
        if self._asked is None or not seats or not layout:
            return
        found, wanted = len(layout), min(self._asked, seats[0].info.num_experts)
        if found != wanted and found not in self._said:
            self._said.add(found)
            log.warning(
                "the experts are in %d shard groups, and --expert-groups asks for %d: those in use stand, and workers "
                "started for others get none; another number takes another --namespace",
                found,
                self._asked,
            )
