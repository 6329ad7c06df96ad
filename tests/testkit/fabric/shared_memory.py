"""Links through shared memory for the contract: steps are made of what tests dispatch and combine. Over memory of the
host; :mod:`testkit.gpu.fabric` has them between GPUs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from moe_kernels.exchange.layout import Layout
from services.fabric.nccl.lanes import Lanes
from services.fabric.shared_memory.host_memory import HostMemory
from services.fabric.shared_memory.link import SharedMemoryLink, SharedMemoryOptions
from services.fabric.shared_memory.memory import PeerMemory
from services.fabric.shared_memory.server import SharedMemoryServer
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.peer import Timing
from services.fabric.tcp.server import ExpertServer
from services.model.experts import ExpertWeights
from services.routing import RoutingTable, ShardGroup
from testkit.fabric.tcp import CALM, SECRET, Compute, facts_of, hello, part_of, serve, served
from testkit.waiting import LIMIT_S

CPU = torch.device("cpu")
SLOTS, ROWS = 8, 64
"""Of every layout here; with fewer slots the rest is absent, with more rows a step goes over tcp."""
READY_S = 60.0


@dataclass(eq=False, slots=True)
class Waiting:
    """A dispatch that leaves with the step of the first ``combine``."""

    layer: int
    batch: tuple[Tensor, Tensor, Tensor]
    y_TD: Tensor | None = None


class SteppedLink:
    """An ExpertLink whose steps hold what was dispatched since the last one: one micro-batch each, other layers empty.

    A step needs its numbers of rows, and all its layers in order, so ``dispatch`` only notes and the first ``combine``
    runs the step: all handles in flight, combined in the order asked for, again until it has finished.
    """

    def __init__(
        self, link: SharedMemoryLink, layers: Sequence[int], hidden: int, dtype: torch.dtype, device: torch.device = CPU
    ) -> None:
        self.link, self._layers = link, list(layers)
        no_rows = torch.zeros(1, hidden, dtype=dtype), torch.full((1, SLOTS), -1), torch.zeros(1, SLOTS)
        self._nothing = no_rows[0].to(device), no_rows[1].to(device), no_rows[2].to(device)
        self._waiting: list[Waiting] = []
        self._step = 0

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Waiting:
        absent = (0, SLOTS - expert_ids_TK.shape[1])
        batch = x_TD, F.pad(expert_ids_TK, absent, value=-1), F.pad(weights_TK, absent, value=float("nan"))
        self._waiting.append(Waiting(layer, batch))
        return self._waiting[-1]

    def combine(self, handle: Waiting) -> Tensor:
        if handle.y_TD is None:
            self._run(handle)
        assert handle.y_TD is not None
        return handle.y_TD

    def usable(self) -> tuple[int, ...]:
        """Seats that share memory."""
        return tuple(sorted(seat.link.seat.number for seat in self.link.peers.usable()))

    def apply(self, table: RoutingTable) -> None:
        self.link.apply(table)

    def _run(self, first: Waiting) -> None:
        waiting, self._waiting = self._waiting, []
        order = [first, *(handle for handle in reversed(waiting) if handle is not first)]
        alike = len({handle.layer for handle in waiting}) == 1
        while True:
            self._step += 1
            self.link.begin_step(self._step, [len(handle.batch[0]) for handle in waiting] if alike else ())
            try:
                found = self._exchanges(waiting, order, alike)
            except BaseException:
                self.link.finish_step()
                raise
            if self.link.finish_step():
                break
        for handle, y_TD in zip(order, found, strict=True):
            handle.y_TD = y_TD

    def _exchanges(self, waiting: Sequence[Waiting], order: Sequence[Waiting], alike: bool) -> list[Tensor]:
        found: list[Tensor] = []
        for layer in self._layers if alike else [waiting[0].layer]:
            if layer == waiting[0].layer:
                found = self._turn(waiting, order)
            else:
                self._turn(empty := [Waiting(layer, self._nothing) for _ in waiting], empty)
        return found

    def _turn(self, waiting: Sequence[Waiting], order: Sequence[Waiting]) -> list[Tensor]:
        handles = {id(one): self.link.dispatch(one.layer, *one.batch) for one in waiting}
        return [self.link.combine(handles[id(one)]) for one in order]


def shared_memory_server(
    compute: Compute, layers: Sequence[int], hidden: int, dtype: torch.dtype, experts: int = 8, **options: Any
) -> SharedMemoryServer:
    facts = {"layers": list(layers), "num_experts": experts, "hidden": hidden, "dtype": dtype}
    return SharedMemoryServer(compute, memory=HostMemory(), device=CPU, **facts, **options)


def serve_shared(compute: Compute, *, hidden: int = 4, dtype: str = "float32", **options: Any) -> ExpertServer:
    """As :func:`testkit.fabric.tcp.serve`, with memory to share."""
    layers = list(options.get("experts") or {0: ()})
    memory = shared_memory_server(compute, layers, hidden, getattr(torch, dtype))
    return serve(compute, hidden=hidden, dtype=dtype, memory=memory, **options)


@contextmanager
def shared_memory_link(
    table: RoutingTable,
    *,
    hidden: int = 4,
    dtype: str = "float32",
    call_s: float = LIMIT_S,
    unavailable_s: float = LIMIT_S,
    timing: Timing = CALM,
    unsummed: bool = True,
    memory: PeerMemory | None = None,
    device: torch.device = CPU,
    seats: int | None = None,
    lanes: Lanes | None = None,
    rows: int = ROWS,
    slots: int = SLOTS,
    node: str = "",
    **options: float,
) -> Iterator[SharedMemoryLink]:
    """Once ``seats``, else all of the table, share memory. A step waits ``call_s`` for a seat; ``lanes`` are tcp's;
    ``options`` of :class:`SharedMemoryOptions` go before."""
    options = {"deadline_s": call_s, "quarantine_s": 10.0, "unavailable_s": unavailable_s} | options
    link = SharedMemoryLink(
        lambda extension: TcpLink(
            table, Facts(hello=hello(hidden, dtype), secret=SECRET, timing=timing, lanes=lanes), extension=extension,
            call_s=call_s, unavailable_s=unavailable_s, reduced=not unsummed,
        ),
        table,
        memory=memory or HostMemory(),
        device=device,
        layers=list(table.group_of),
        layout=Layout(rows=rows, hidden=hidden, slots=slots, dtype=getattr(torch, dtype), unsummed=unsummed),
        node=node,
        options=SharedMemoryOptions(**options),
    )  # fmt: skip
    wanted = len(table.seats) if seats is None else seats
    try:
        assert link.peers.wait_for(lambda shared: len(shared) >= wanted, READY_S), "no memory is shared"
        assert lanes is None or link.wait_ready(READY_S), "there are no lanes"  # else the first steps would use neither
        yield link
    finally:
        link.close()


@contextmanager
def linked_shared(
    table: RoutingTable, *, hidden: int = 4, dtype: str = "float32", device: torch.device = CPU, **options: Any
) -> Iterator[SteppedLink]:
    """As :func:`shared_memory_link`, by steps."""
    with shared_memory_link(table, hidden=hidden, dtype=dtype, device=device, **options) as link:
        yield SteppedLink(link, list(table.group_of), hidden, getattr(torch, dtype), device)


@contextmanager
def shared_link(
    layers: Mapping[int, ExpertWeights], num_experts: int, replicas: Sequence[int], *, unsummed: bool = True
) -> Iterator[SteppedLink]:
    """A link to servers of their own: group i has ``replicas[i]`` seats."""
    facts = facts_of(layers)

    def start(number: int, group: ShardGroup) -> ExpertServer:
        forward = part_of(layers, group, num_experts).forward
        return serve_shared(forward, seat=number, experts=group.experts, **facts)

    with (
        served(layers, num_experts, replicas, start) as table,
        linked_shared(table, unsummed=unsummed, **facts) as link,
    ):
        yield link
