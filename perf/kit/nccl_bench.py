"""Pieces of ``perf/fabric/nccl_lane.py``: experts whose results are known, worker processes, bare process groups."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from testkit.fabric.gloo_groups import GlooGroups
from torch import Tensor

from perf.kit.nccl_processes import Process, say
from services.fabric.nccl.lanes import Lanes, LaneServer
from services.fabric.nccl.process_groups import Groups, NcclGroups
from services.fabric.nccl.weights import WeightsGiver
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.peer import Timing
from services.fabric.tcp.server import ExpertServer
from services.model.experts import ExpertShard, ExpertWeights
from services.routing import RoutingTable, Seat, ShardGroup, even_groups

SECRET = b"the secret of one measurement"
TIMING = Timing(handshake_s=20.0, alive_s=0.5, silence_s=5.0)
EXPERTS, HIDDEN, WIDE = 8, 128, 4096
MAX_BYTES = 160 << 20
SCALES = [1, -2, 3, 5, -7, 11, 13, -17]
IDENTITY, SCALED, RANDOM = 0, 1, 2
"""Layers of the small model, float32."""
ECHO = 0
"""The only layer of the wide one, bfloat16: it returns its rows, so that a round trip is the link's."""


def groups_on(lane: str, gpu: int) -> Groups:
    return GlooGroups() if lane == "gloo" else NcclGroups(torch.device("cuda", gpu))


def device_of(lane: str, gpu: int) -> torch.device:
    return torch.device("cpu") if lane == "gloo" else torch.device("cuda", gpu)


def scaling_experts(scales: list[int], device: torch.device) -> ExpertWeights:
    """Expert e returns ``scales[e]`` times a row whose first element is 1: the gate is 128, whose silu is 128."""
    w_gate_up_E2FD = torch.zeros(EXPERTS, 2 * HIDDEN, HIDDEN)
    w_gate_up_E2FD[:, :HIDDEN, 0] = 128
    w_gate_up_E2FD[:, HIDDEN:] = torch.eye(HIDDEN)
    w_down_EDF = torch.stack([torch.eye(HIDDEN) * scale / 128 for scale in scales])
    return _experts(w_gate_up_E2FD, w_down_EDF, device)


def random_experts(device: torch.device) -> ExpertWeights:
    generator = torch.Generator().manual_seed(7)
    w_gate_up_E2FD = torch.randn(EXPERTS, 2 * HIDDEN, HIDDEN, generator=generator) / 8
    return _experts(w_gate_up_E2FD, torch.randn(EXPERTS, HIDDEN, HIDDEN, generator=generator) / 8, device)


def _experts(w_gate_up_E2FD: Tensor, w_down_EDF: Tensor, device: torch.device) -> ExpertWeights:
    ids = tuple(range(EXPERTS))
    return ExpertWeights(expert_ids=ids, w_gate_up_E2FD=w_gate_up_E2FD.to(device), w_down_EDF=w_down_EDF.to(device))


def small_model(device: torch.device) -> dict[int, ExpertWeights]:
    return {
        IDENTITY: scaling_experts([1] * EXPERTS, device),
        SCALED: scaling_experts(SCALES, device),
        RANDOM: random_experts(device),
    }


def rows_of(rows: int, slots: int, seed: int, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Whole numbers with 1 in front, distinct ids, weights that no power of two divides evenly."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randint(-8, 9, (rows, HIDDEN), generator=generator).float()
    x_TD[:, 0] = 1
    ids_TK = torch.rand(rows, EXPERTS, generator=generator).topk(slots, dim=1).indices
    weights_TK = torch.rand(rows, slots, generator=generator)
    return x_TD.to(device), ids_TK.to(device), weights_TK.to(device)


def hello(hidden: int, dtype: str, seat: int = -1) -> Hello:
    worker = f"experts-{seat}" if seat >= 0 else "attention-0"
    return Hello(fingerprint="model", worker=worker, hidden=hidden, dtype=dtype, seat=seat, package="0")


def groups(count: int) -> tuple[ShardGroup, ...]:
    return even_groups([IDENTITY, SCALED, RANDOM], EXPERTS, count)


def table(seats: list[Seat], *, cut: int = 1, epoch: int = 1, wide: bool = False) -> RoutingTable:
    of = even_groups([ECHO], 1, 1) if wide else groups(cut)
    experts = 1 if wide else EXPERTS
    return RoutingTable(epoch=epoch, fingerprint="model", num_experts=experts, groups=of, seats=tuple(seats))


@contextmanager
def linked(of: RoutingTable, lanes: Lanes | None, *, wide: bool = False, call_s: float = 5.0) -> Iterator[TcpLink]:
    facts = Facts(
        hello=hello(WIDE, "bfloat16") if wide else hello(HIDDEN, "float32"),
        secret=SECRET,
        timing=TIMING,
        max_bytes=MAX_BYTES,
        lanes=lanes,
    )
    link = TcpLink(of, facts, call_s=call_s, unavailable_s=20.0)
    try:
        wait_usable(link, len(of.seats))
        yield link
    finally:
        link.close()


def wait_usable(link: TcpLink, seats: int, seconds: float = 40.0) -> float:
    began = time.monotonic()
    while len(link.usable()) < seats:
        problems = [str(seat.problem) for seat in link._seats.links.values() if seat.problem]
        assert time.monotonic() < began + seconds, f"usable: {link.usable()}; {problems}"
        time.sleep(0.001)
    return time.monotonic() - began


def serve_worker(lane: str, gpu: int, seat: int, layers: int, mib: int) -> None:
    """The body of a worker process: two servers, the small model's and the wide one's; ends with its stdin."""
    device = device_of(lane, gpu)
    lanes = Lanes(groups_on(lane, gpu))
    shard = ExpertShard(small_model(device), num_experts=EXPERTS)

    def moved(layer: int, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return shard.forward(layer, x_TD.to(device), ids_TK.to(device), weights_TK.to(device))

    def echo(_layer: int, x_TD: Tensor, _ids_TK: Tensor, _weights_TK: Tensor) -> Tensor:
        return x_TD.to(device, copy=True)

    warm(shard, device)
    facts: dict[str, Any] = {"secret": SECRET, "timing": TIMING, "max_bytes": MAX_BYTES}
    ids = tuple(range(EXPERTS))
    small = ExpertServer(
        moved,
        experts=dict.fromkeys((IDENTITY, SCALED, RANDOM), ids),
        hello=hello(HIDDEN, "float32", seat),
        extensions=[LaneServer(lanes)],
        **facts,
    )
    generator = torch.Generator(device).manual_seed(seat)
    held = {
        layer: (
            ids, {"w": torch.randn(EXPERTS, mib << 16, device=device, dtype=torch.bfloat16, generator=generator)}
        )
        for layer in range(layers)
    }  # fmt: skip
    wide = ExpertServer(
        echo,
        experts={ECHO: (0,)},
        hello=hello(WIDE, "bfloat16", seat),
        extensions=[WeightsGiver(held), LaneServer(lanes)],
        **facts,
    )
    for server in (small, wide):
        server.start()
    say("served", *small.address, *wide.address)
    sys.stdin.read()


def warm(shard: ExpertShard, device: torch.device) -> None:
    """Compiles what calls of any size need, so that no call is late for that."""
    for rows in (1, 2, 5, 8, 14, 32, 64, 96, 128, 160, 256, 320, 512, 1024, 2664, 4000, 8000):
        x_TD, ids_TK = torch.zeros(rows, HIDDEN, device=device), torch.arange(rows, device=device).view(-1, 1) % EXPERTS
        shard.forward(SCALED, x_TD, ids_TK, torch.ones(rows, 1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def bare_worker(lane: str, gpu: int, port: int) -> None:
    """Sends back what comes over two bare process groups; sizes in bytes by stdin, one round trip each count."""
    pair = BarePair(lane, gpu, 1, port)
    say("bare", *pair.times)
    for line in sys.stdin:
        size, count = map(int, line.split())
        buffer = torch.empty(size, dtype=torch.uint8, device=pair.device)
        say("go", size)
        for _ in range(count):  # between GPUs all are in its stream at once, and the host waits for none
            pair.receive(buffer, wait=lane == "gloo")
            pair.send(buffer)


class BarePair:
    """Two groups of two as a lane has them, made over a store of torch's, and nothing around them."""

    def __init__(self, lane: str, gpu: int, rank: int, port: int, groups: Groups | None = None) -> None:
        began = time.perf_counter()
        self.device, self._rank = device_of(lane, gpu), rank
        self._groups = groups or groups_on(lane, gpu)
        store = dist.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=150), wait_for_workers=False)
        names = ("forth", "back") if rank == 0 else ("back", "forth")
        made = {name: self._groups.make(dist.PrefixStore(name, store), rank, "127.0.0.1") for name in ("forth", "back")}  # type: ignore[arg-type]
        self._store = store
        self._out, self._in = (made[name] for name in names)
        created, token = time.perf_counter() - began, torch.zeros(8, dtype=torch.uint8, device=self.device)
        began = time.perf_counter()
        for step in (self.send, self.receive) if rank == 0 else (self.receive, self.send):
            step(token)
        self.times = f"{created:.3f}", f"{time.perf_counter() - began:.3f}"

    def send(self, rows: Tensor) -> None:
        self._sent = self._groups.send(self._out, 1 - self._rank, rows)

    def receive(self, rows: Tensor, *, wait: bool = True) -> None:
        transfer = self._groups.receive(self._in, 1 - self._rank, rows)
        if wait:
            transfer.finish(time.monotonic() + 10, lambda: False)

    def abort(self, seconds: float) -> float | None:
        """Both at the same time, as a lane does it. What it took; None after ``seconds``: then both are left."""
        began = time.perf_counter()
        ends = [
            threading.Thread(target=self._groups.abort, args=(group,), daemon=True) for group in (self._out, self._in)
        ]
        for end in ends:
            end.start()
        for end in ends:
            end.join(max(0.0, began + seconds - time.perf_counter()))
        return None if any(end.is_alive() for end in ends) else time.perf_counter() - began


def seat(process: Process, number: int, group: int = 0) -> tuple[Seat, Seat]:
    """The worker's two servers: the small model's and the wide one's."""
    host, small, host_too, wide = process.hear("served")
    facts: dict[str, Any] = {"number": number, "worker": f"experts-{number}"}
    return Seat(group=group, host=host, port=int(small), **facts), Seat(group=0, host=host_too, port=int(wide), **facts)


def shapes_of(layers: int, mib: int) -> Mapping[int, Mapping[str, tuple[int, ...]]]:
    return {layer: {"w": (EXPERTS, mib << 16)} for layer in range(layers)}
