"""Seats that serve :func:`testkit.fabric.tcp.scaled`, by kind, and links to them: for the contract on membership."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from services.fabric.tcp.server import ExpertServer
from services.routing import RoutingTable
from testkit.fabric.shared_memory import linked_shared, serve_shared
from testkit.fabric.tcp import Compute, lanes_of, linked, scaled, serve
from testkit.gpu.fabric import Way
from testkit.gpu.workers import GpuPool, GpuServer

Held = Mapping[int, Sequence[int]]
"""Experts by layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """``shared``: memory of the host. ``lane``: ``gloo`` or none. ``reduced``: sums return."""

    lane: str = ""
    shared: bool = False
    reduced: bool = False


KINDS = {
    "tcp": Kind(),
    "tcp-reduced": Kind(reduced=True),
    "lane": Kind(lane="gloo"),
    "shared": Kind(shared=True),
    "shared-summed": Kind(shared=True, reduced=True),
}
GPU_KINDS = {
    "shared": Way(shared=True, lane=False),
    "shared-summed": Way(shared=True, summed=True, lane=False),
    "nccl": Way(shared=False),
}


class Server(Protocol):
    """A seat's."""

    @property
    def address(self) -> tuple[str, int]: ...
    def drain(self, seconds: float) -> bool: ...
    def close(self) -> None: ...
    def kill(self) -> None: ...


class ThreadServer:
    """In this process: dying is closing everything at once."""

    def __init__(self, server: ExpertServer) -> None:
        self.address, self.drain, self.close, self.kill = server.address, server.drain, server.close, server.close


class Seats(Protocol):
    """Makes seats, numbered as they come, and links to them. ``threads`` may use a link at once."""

    threads: int

    def serve(self, experts: Held, group: int = 0, compute: Compute = scaled) -> tuple[int, Server]: ...

    def linked(self, table: RoutingTable, *, without: int = 0, **options: Any) -> AbstractContextManager[Any]:
        """A link once its seats are usable, but for so many that never will have memory or a lane."""
        ...

    def check(self, link: Any) -> None:
        """That rows took the way that is tested."""


class ThreadSeats:
    def __init__(self, kind: Kind, first: int = 0) -> None:
        self._kind, self._numbers = kind, itertools.count(first)
        self.threads = 1 if kind.shared else 2

    def serve(self, experts: Held, group: int = 0, compute: Compute = scaled) -> tuple[int, Server]:  # noqa: ARG002
        number = next(self._numbers)
        start = serve_shared if self._kind.shared else partial(serve, lane=self._kind.lane)
        return number, ThreadServer(start(compute, seat=number, experts=experts))

    @contextmanager
    def linked(self, table: RoutingTable, *, without: int = 0, **options: Any) -> Iterator[Any]:
        kind = self._kind
        if kind.shared:
            usable = len(table.seats) - without
            made: Any = linked_shared(table, seats=usable, unsummed=not kind.reduced, **options)
        else:
            lanes = lanes_of(kind.lane, required=not without)
            made = linked(table, lanes=lanes, reduced=kind.reduced, **options)
        with made as link:
            yield link

    def check(self, link: Any) -> None:
        assert not self._kind.shared or link.link.shared_steps > 0


class GpuSeats:
    """Each in a process of its own, replicas of a group on one GPU, groups on different ones where there are enough."""

    def __init__(self, pool: GpuPool, way: Way) -> None:
        self._pool, self._way = pool, way
        self.threads = 1 if way.shared else 2
        for group in range(2):
            pool.prepare(group, SPARE)

    def serve(self, experts: Held, group: int = 0, compute: Compute = scaled) -> tuple[int, Server]:
        assert compute is scaled, "other computations stay in this process"
        number, worker = self._pool.next_number(), self._pool.take(group)
        facts: dict[str, Any] = {"weights": None, "hidden": 4, "dtype": "float32", "num_experts": 8}
        done = partial(self._pool.give_back, place=group)
        return number, GpuServer(worker, number, done, experts=experts, shared=self._way.shared, **facts)

    def linked(self, table: RoutingTable, *, without: int = 0, **options: Any) -> AbstractContextManager[Any]:
        assert not without
        return self._way.linked(table, **options)

    def check(self, link: Any) -> None:
        assert not self._way.shared or link.link.shared_steps > 0


SPARE = 5
"""Processes that wait for a group to need them: starting one takes seconds."""
