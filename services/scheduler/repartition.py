"""Replaces one cut of the experts into groups by another, while every expert is served by some seat.

A table has one cut, and a seat holds a whole group. So half of the seats of each group that changes go ahead (a seat of
a larger group, where the group has only one): out of the table, they load what the group will hold, while the others
serve what it holds. When all seats that went ahead are ready, one table changes the cut, and the others follow as seats
without a group.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass

from services.errors import ConfigError, NotReady
from services.placement import Hysteresis, Load, Plan, replan
from services.queue.seats import SeatState
from services.routing import RoutingTable, ShardGroup

log = logging.getLogger(__name__)

Groups = tuple[ShardGroup, ...]
TIMEOUT_WAITS = 10
"""Time limit of a change, in waiting times of the hysteresis; after a failure the next change waits as long."""
SLACK = 1.25
"""Limit of a group's size, in even shares of a layer's experts; the room of its seats is another."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """The next step of a change: ``layout`` is the cut of the next table, the seats ``ahead`` are in no table, and
    ``assign`` has those of them that are new."""

    layout: Sequence[ShardGroup]
    ahead: frozenset[int] = frozenset()
    assign: tuple[tuple[SeatState, ShardGroup], ...] = ()


def next_step(seats: Sequence[SeatState], layout: Sequence[ShardGroup], target: Sequence[ShardGroup]) -> Step | None:
    """Say how ``layout`` becomes ``target``. None: it cannot, as too few seats are left, or a seat that serves a group
    has no room for what the group becomes.

    Args:
        seats: the seats that stay.
    """
    now = {group.number: group for group in layout}
    coming = [group for group in target if now.get(group.number) != group]
    if not all(seat.has_room(group) for group in coming for seat in _members(seats, group, now)):
        return None
    ahead = [(group, [seat for seat in seats if seat.assigned == group.digest]) for group in coming]
    if all(found and all(seat.serves(group) for seat in found) for group, found in ahead):
        return Step(layout=target)
    serving = {
        group.number: [seat for seat in seats if seat.assigned in (None, group.digest) and seat.serves(group)]
        for group in layout
    }
    if not all(serving.get(group.number) for group in coming):
        return None
    assign = _sent_ahead([group for group, found in ahead if not found], serving)
    if assign is None:
        return None
    gone = {seat.number for _, found in ahead for seat in found} | {seat.number for seat, _ in assign}
    return Step(layout=layout, ahead=frozenset(gone), assign=tuple(assign))


def _sent_ahead(
    groups: Sequence[ShardGroup], serving: dict[int, list[SeatState]]
) -> list[tuple[SeatState, ShardGroup]] | None:
    """Return seats for ``groups``: half of a group's own, or one of the largest group's where a group has only one.
    None: no seat can be spared. The seats are taken out of ``serving``."""
    assign: list[tuple[SeatState, ShardGroup]] = []
    for group in groups:
        own = serving[group.number]
        assign += [(own.pop(), group) for _ in range(len(own) // 2)]
    for group in (group for group in groups if all(group is not sent for _, sent in assign)):
        lender = max(serving.values(), key=len)
        if len(lender) < 2 or lender[-1].info.group is not None or not lender[-1].has_room(group):
            return None
        assign.append((lender.pop(), group))
    return assign


def _members(seats: Sequence[SeatState], coming: ShardGroup, now: Mapping[int, ShardGroup]) -> list[SeatState]:
    """Return the seats of the group that is to become ``coming``."""
    digests = {now[coming.number].digest} if coming.number in now else set()
    return [seat for seat in seats if {seat.assigned, seat.report.digest} & digests]


class Repartitioner:
    """Looks for a better cut on a thread of its own, and keeps it as the target until a table has it.

    Args:
        plan: :func:`services.placement.replan`, which takes ten seconds for 48 layers of 128 experts.
        on_done: called when a table has the target.
    """

    def __init__(
        self,
        hysteresis: Hysteresis,
        *,
        clock: Callable[[], float],
        plan: Callable[..., Plan] = replan,
        on_done: Callable[[], None] = lambda: None,
    ) -> None:
        self._hysteresis = hysteresis
        self._clock = clock
        self._plan, self._on_done = plan, on_done
        self._next = 0.0
        self._planned: tuple[Groups, Future[Plan]] | None = None
        self._since = 0.0
        self.target: Groups | None = None

    @property
    def late(self) -> bool:
        """Whether the seats that went ahead have had their time: one of them may never be ready."""
        return self.target is not None and self._clock() > self._since + TIMEOUT_WAITS * self._hysteresis.wait_s

    def give_up(self) -> None:
        if self.target is not None:
            log.warning("cancelled repartitioning the shard groups: too few seats are ready or have room for it")
            self._next = self._clock() + TIMEOUT_WAITS * self._hysteresis.wait_s
        self.target = None

    def follow(self, table: RoutingTable, load: Load | None, rooms: Mapping[int, int] | None = None) -> None:
        """Take what was planned, or plan. ``load`` is given while every seat is ready and the table has stood.

        ``rooms``: group number -> experts of a layer that each of its seats has room for, where that is limited.
        """
        if self.target is not None and self.target == table.groups:
            log.info("repartitioned the shard groups")
            self.target = None
            self._on_done()
        if self._planned is not None and self._planned[1].done():
            (groups, planned), self._planned = self._planned, None
            self._take(groups, planned, table)
        elif load is not None and self.target is None and self._planned is None and self._clock() >= self._next:
            self._next = self._clock() + self._hysteresis.wait_s
            self._planned = table.groups, self._start(table, load, rooms)

    def _take(self, groups: Groups, planned: Future[Plan], table: RoutingTable) -> None:
        error = planned.exception()
        if isinstance(error, ConfigError | NotReady):
            log.warning("cannot repartition the shard groups: %s", error.message)
            return
        plan = planned.result()
        if table.groups == groups != plan.table.groups:
            log.info(
                "repartitioning the shard groups to lower max/mean load from %.2f to %.2f", plan.before, plan.after
            )
            self.target, self._since = plan.table.groups, self._clock()

    def _start(self, table: RoutingTable, load: Load, rooms: Mapping[int, int] | None) -> Future[Plan]:
        """Plan on a thread. The future is not asyncio's: nobody has to await its result or its error."""
        planned: Future[Plan] = Future()
        largest = max(group.size for group in table.groups)  # fits; smaller, and experts of it had to go anywhere
        limit = max(-(-int(SLACK * table.num_experts) // len(table.groups)), largest)

        def run() -> None:
            try:
                planned.set_result(self._plan(table, load, hysteresis=self._hysteresis, limit=limit, rooms=rooms))
            except BaseException as error:  # noqa: BLE001  raised again where the result is taken
                planned.set_exception(error)

        threading.Thread(target=run, name="replan", daemon=True).start()
        return planned
