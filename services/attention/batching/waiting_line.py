"""The order in which waiting sequences start: tenants take turns by the tokens they were given. Pure Python.

This is the virtual token counter of Sheng et al., "Fairness in Serving Large Language Models" (2024). Of the tenants
that wait, the one that was given the least tokens is next. The counter of a tenant that comes back is raised to that of
the others, so that no tenant saves turns up. A request is charged when it starts, with its cost in the queue.
"""

from __future__ import annotations

from bisect import insort
from typing import Generic, Protocol, TypeVar

from services.messages import GenerateRequest

_MAX_COUNTERS = 1024
"""Most counters. If there are more, those of tenants without waiting sequences are dropped."""


class Waiting(Protocol):
    """A sequence as the line sees it. ``arrival`` is a running number; ``preempted``: it had started before."""

    @property
    def request(self) -> GenerateRequest: ...

    @property
    def arrival(self) -> int: ...

    @property
    def preempted(self) -> bool: ...


State = TypeVar("State", bound=Waiting)


class WaitingLine(Generic[State]):
    """Orders sequences by priority; then preempted ones come first, then tenants take turns; then by arrival."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, bool, str], list[State]] = {}
        self._given: dict[tuple[int, str], int] = {}
        """(priority, tenant) -> cost of the requests that started."""
        self._floor: dict[int, int] = {}
        """Priority -> counter of the tenant that started last, before that start."""
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def first(self) -> State:
        """The sequence that starts next. The line must not be empty."""
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
        """Remove ``state``, the first, and charge its tenant unless the request had started before."""
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
        """Remove ``state`` if it waits."""
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
        """Drop the counters of tenants without waiting sequences: they come back as new tenants."""
        waiting = {(priority, tenant) for priority, fresh, tenant in self._lines if fresh}
        self._given = {name: given for name, given in self._given.items() if name in waiting}


def _line_of(state: Waiting) -> tuple[int, bool, str]:
    return state.request.priority, not state.preempted, "" if state.preempted else state.request.tenant
