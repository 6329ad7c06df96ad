"""Who of the waiting sequences starts next: tenants in turn, by the tokens they were given. Pure Python.

The virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (2024): of the tenants that wait,
the one that was given the fewest tokens is next, and one that comes back is lifted to what the others have, so that
nobody saves turns up. A request is charged as it starts, with what the queue charges for it: its prompt and all that
may follow.
"""

from __future__ import annotations

from bisect import insort
from typing import Generic, Protocol, TypeVar

from services.messages import GenerateRequest

_MAX_COUNTERS = 1024
"""Where there are more once a sequence starts, those of tenants of whom nothing waits are dropped."""


class Waiting(Protocol):
    """A sequence, as far as it is known here. ``arrival`` is a running number; what was ``preempted`` had started
    before."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def arrival(self) -> int: ...

    @property
    def preempted(self) -> bool: ...


State = TypeVar("State", bound=Waiting)


class WaitingLine(Generic[State]):
    """Sequences by priority, then those that were preempted, then tenants in turn; within each by arrival."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, bool, str], list[State]] = {}
        self._given: dict[tuple[int, str], int] = {}
        """Cost of requests started, by priority and tenant."""
        self._floor: dict[int, int] = {}
        """By priority, what the tenant that started last had been given before."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> State:
        """The sequence that starts next. There must be one."""
        return self._lines[min(self._lines, key=self._order)][0]

    def add(self, state: State) -> None:
        priority, tenant = state.request.priority, state.request.tenant
        if not state.preempted:
            floor = self._floor.get(priority, 0)
            given = self._given.get((priority, tenant), 0)
            self._given[priority, tenant] = max(given, floor)
        insort(self._lines.setdefault(_line_of(state), []), state, key=lambda each: each.arrival)
        self._size += 1

    def start(self, state: State) -> None:
        """Takes ``state``, the first, out; its tenant is charged for a request that was not started before."""
        self.remove(state)
        if state.preempted:
            return
        priority, tenant = state.request.priority, state.request.tenant
        given = self._given[priority, tenant]
        self._floor[priority] = max(given, self._floor.get(priority, 0))
        self._given[priority, tenant] = given + state.request.cost
        if len(self._given) > _MAX_COUNTERS:
            self._forget()

    def remove(self, state: State) -> None:
        """Takes ``state`` out, wherever it stands. Nothing happens where it does not wait."""
        name = _line_of(state)
        line = self._lines.get(name, [])
        if state not in line:
            return
        line.remove(state)
        self._size -= 1
        if not line:
            del self._lines[name]

    def _order(self, name: tuple[int, bool, str]) -> tuple[int, bool, int, int]:
        priority, fresh, tenant = name
        return priority, fresh, self._given[priority, tenant] if fresh else 0, self._lines[name][0].arrival

    def _forget(self) -> None:
        """Drops the counters of tenants of whom nothing waits: they come back as newcomers."""
        waiting = {(priority, tenant) for priority, fresh, tenant in self._lines if fresh}
        self._given = {name: given for name, given in self._given.items() if name in waiting}


def _line_of(state: Waiting) -> tuple[int, bool, str]:
    return state.request.priority, not state.preempted, "" if state.preempted else state.request.tenant
