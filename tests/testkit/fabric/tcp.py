"""Expert servers and links over loopback: experts split over seats, by hand or as an ExpertLink for the contract."""

from __future__ import annotations

import itertools
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from services.errors import SeatLost
from services.fabric.nccl.lanes import Lanes, LaneServer
from services.fabric.nccl.weights import WeightsGiver
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.peer import Timing
from services.fabric.tcp.server import ExpertServer
from services.fabric.tcp.stream import Stream
from services.model.experts import ExpertShard, ExpertWeights
from services.routing import RoutingTable, Seat, ShardGroup, even_groups
from testkit.fabric.gloo_groups import GlooGroups
from testkit.waiting import LIMIT_S, until

SECRET = b"one secret for all workers"
CALM = Timing(handshake_s=20.0, alive_s=0.1, silence_s=10.0)
"""Nothing runs out although neighbours take the cores for seconds: for tests that are not about time."""
FAST = Timing(handshake_s=2.0, alive_s=0.1, silence_s=1.0)
"""For tests of silence and of handshakes that take too long."""
Compute = Callable[[int, Tensor, Tensor, Tensor], Tensor]
Serve = Callable[..., ExpertServer]
"""As :func:`serve`."""
ONES = torch.ones(3, 4)


def hello(hidden: int = 4, dtype: str = "float32", *, seat: int = -1, **facts: Any) -> Hello:
    worker = f"experts-{seat}" if seat >= 0 else "attention-0"
    named: dict[str, Any] = {"fingerprint": "model", "package": "0"} | facts
    return Hello(worker=worker, hidden=hidden, dtype=dtype, seat=seat, **named)


def double(_layer: int, x_TD: Tensor, _ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    return 2 * x_TD * weights_TK.sum(1, keepdim=True).to(x_TD.dtype)


def scaled(_layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
    """Expert e returns e + 1 times the row: exact for small whole numbers and dyadic weights."""
    return x_TD * torch.where(ids_TK >= 0, (ids_TK + 1) * weights_TK, 0).sum(1, keepdim=True)


def lanes_of(lane: str, *, required: bool = True) -> Lanes | None:
    """Lanes over ``gloo``, which a seat must have if they are ``required``; None for ``""``: rows go in frames."""
    return Lanes(GlooGroups(), required=required) if lane else None


def serve(
    compute: Compute = double,
    *,
    lane: str = "",
    seat: int = 0,
    experts: Mapping[int, Sequence[int]] | None = None,
    hidden: int = 4,
    dtype: str = "float32",
    lanes: Lanes | None = None,
    weights: Mapping[int, Any] | None = None,
    memory: ServerExtension | None = None,
    **options: Any,
) -> ExpertServer:
    """Start a server; ``lane`` or ``lanes``, ``weights`` to send and shared ``memory`` become its extensions."""
    held = {0: range(8)} if experts is None else experts
    extensions: list[ServerExtension] = [WeightsGiver(weights or {})]
    if (lanes := lanes or lanes_of(lane, required=False)) is not None:
        extensions.append(LaneServer(lanes))
    if memory is not None:
        extensions.append(memory)
    options = {"timing": CALM, "secret": SECRET, "hello": hello(hidden, dtype, seat=seat)} | options
    server = ExpertServer(compute, experts=held, extensions=extensions, **options)
    server.start()
    return server


def seat_of(server: ExpertServer, number: int, group: int = 0) -> Seat:
    host, port = server.address
    return Seat(number=number, worker=f"experts-{number}", group=group, host=host, port=port)


def table_of(
    *seats: Seat, groups: Sequence[ShardGroup] | None = None, epoch: int = 1, experts: int = 8
) -> RoutingTable:
    cut = tuple(even_groups([0], experts, 1) if groups is None else groups)
    return RoutingTable(epoch=epoch, fingerprint="model", num_experts=experts, groups=cut, seats=seats)


def table_at(*servers: ExpertServer, epoch: int = 1) -> RoutingTable:
    """Replicas of one group, numbered as they come."""
    return table_of(*(seat_of(server, number) for number, server in enumerate(servers)), epoch=epoch)


@contextmanager
def linked(
    table: RoutingTable,
    *,
    hidden: int = 4,
    dtype: str = "float32",
    ready: bool = True,
    ready_s: float = LIMIT_S,
    lane: str = "",
    **options: Any,
) -> Iterator[TcpLink]:
    """A link with ``options`` of :class:`TcpLink` or :class:`Facts`, once it is connected to all seats if ``ready``."""
    options = {
        "timing": CALM, "secret": SECRET, "call_s": 20.0, "unavailable_s": 20.0, "lanes": lanes_of(lane)
    } | options  # fmt: skip
    of_facts = {field.name: options.pop(field.name) for field in fields(Facts) if field.name in options}
    link = TcpLink(table, Facts(hello=hello(hidden, dtype), **of_facts), **options)
    try:
        if ready:
            until(
                lambda: len(link.usable()) == len(table.seats), "all seats are usable", limit_s=ready_s, every_s=0.002
            )
        yield link
    finally:
        link.close()


def part_of(layers: Mapping[int, ExpertWeights], group: ShardGroup, num_experts: int) -> ExpertShard:
    """The experts of ``group`` alone."""
    return ExpertShard(held_by(group, layers), num_experts=num_experts)


def held_by(group: ShardGroup, layers: Mapping[int, ExpertWeights]) -> dict[int, ExpertWeights]:
    held = {}
    for layer, weights in layers.items():
        ids = group.experts[layer]
        held[layer] = ExpertWeights(
            expert_ids=ids,
            w_gate_up_E2FD=weights.w_gate_up_E2FD[list(ids)].contiguous(),
            w_down_EDF=weights.w_down_EDF[list(ids)].contiguous(),
        )
    return held


@contextmanager
def tcp_link(
    layers: Mapping[int, ExpertWeights], num_experts: int, replicas: Sequence[int], lane: str = "", **options: Any
) -> Iterator[TcpLink]:
    """A link to servers of their own: group i has ``replicas[i]`` seats."""
    facts = facts_of(layers)

    def start(number: int, group: ShardGroup) -> ExpertServer:
        forward = part_of(layers, group, num_experts).forward
        return serve(forward, seat=number, experts=group.experts, lane=lane, **facts)

    with (
        served(layers, num_experts, replicas, start) as table,
        linked(table, lane=lane, **facts, **options) as link,
    ):
        yield link


def facts_of(layers: Mapping[int, ExpertWeights]) -> dict[str, Any]:
    """What servers and links say of rows."""
    some = next(iter(layers.values())).w_down_EDF
    return {"hidden": some.shape[1], "dtype": str(some.dtype).removeprefix("torch.")}


@contextmanager
def served(
    layers: Mapping[int, ExpertWeights],
    num_experts: int,
    replicas: Sequence[int],
    start: Callable[[int, ShardGroup], Any],
    numbers: Iterator[int] | None = None,
) -> Iterator[RoutingTable]:
    """A table of servers that end with it: group i has ``replicas[i]`` seats, each from ``start(number, group)``."""
    groups, numbers = even_groups(list(layers), num_experts, len(replicas)), numbers or itertools.count()
    servers, seats = list[Any](), list[Seat]()
    try:
        for group, count in zip(groups, replicas, strict=True):
            for number in itertools.islice(numbers, count):
                servers.append(start(number, group))
                seats.append(seat_of(servers[-1], number, group.number))
        yield table_of(*seats, groups=groups, experts=num_experts)
    finally:
        for server in servers:
            server.close()


@contextmanager
def pair() -> Iterator[tuple[Stream, Stream]]:
    """Two ends of a connection."""
    listener = socket.create_server(("127.0.0.1", 0))
    near = socket.create_connection(listener.getsockname())
    far, _ = listener.accept()
    streams = Stream(near, silence_s=10, name="near"), Stream(far, silence_s=10, name="far")
    yield streams
    for stream in streams:
        stream.close()
    listener.close()


@contextmanager
def idle(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    with ExitStack() as stack:
        yield [stack.enter_context(socket.create_connection(address, timeout=30)) for _ in range(count)]


def ended(stream: Stream) -> bool:
    """Whether the other side closes within the time that the stream waits. Takes away what it says before."""
    try:
        while True:
            stream.recv_into(memoryview(bytearray(1)))
    except SeatLost as error:
        return "silent" not in error.message
    finally:
        stream.close()


def send(link: TcpLink, x_TD: Tensor, expert: int = 0) -> Tensor:
    """Every row to one expert of layer 0, with weight 1."""
    ids_TK = torch.full((len(x_TD), 1), expert)
    return link.combine(link.dispatch(0, x_TD, ids_TK, torch.ones(len(x_TD), 1)))


def doubles(link: TcpLink) -> bool:
    """Whether rows come back from seats that :func:`double`."""
    return torch.equal(send(link, ONES), 2 * ONES)
