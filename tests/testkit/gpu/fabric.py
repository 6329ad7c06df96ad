"""Links between GPUs for the contract: this process has the first GPU, expert workers and ranks the others."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor

from services.fabric.link import ExpertLink
from services.fabric.local import LocalLink
from services.fabric.lockstep.build import LockstepShape
from services.fabric.nccl.lanes import Lanes
from services.fabric.nccl.process_groups import NcclGroups
from services.fabric.shared_memory.cuda_memory import CudaMemory
from services.model.experts import ExpertShard, ExpertWeights
from services.routing import RoutingTable, ShardGroup
from testkit.fabric.lockstep import dealt_link
from testkit.fabric.shared_memory import linked_shared
from testkit.fabric.tcp import facts_of, held_by, linked, served
from testkit.gpu.packing import packed
from testkit.gpu.ranks import GpuRanks
from testkit.gpu.workers import GpuPool, GpuServer

FIRST = torch.device("cuda:0")
CALL_S = 60.0
"""The first call of a size compiles its kernels."""
ADDITIONS = 8
"""Most that make up one sum here."""
Layers = Mapping[int, ExpertWeights]


@cache
def first_lanes() -> Lanes:
    return Lanes(NcclGroups(FIRST), required=True)


class OnDevice:
    """An ExpertLink that takes rows of the CPU to one of ``device``, and what comes back home again."""

    def __init__(self, link: ExpertLink[Any], device: torch.device) -> None:
        self._link, self._device = link, device

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Any:
        return self._link.dispatch(layer, *(part.to(self._device) for part in (x_TD, expert_ids_TK, weights_TK)))

    def combine(self, handle: Any) -> Tensor:
        return self._link.combine(handle).cpu()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._link, name)


class GpuLinks:
    """Opens links, each once for the same experts: between GPUs that takes seconds.

    Args:
        another_order: it adds partial sums, or seats add with kernels that round differently for few rows and many.
    """

    def __init__(
        self, open_link: Callable[[Layers], AbstractContextManager[Any]], *, another_order: bool = False
    ) -> None:
        self._open, self.another_order = open_link, another_order
        self._compared, self._unequal, self._most = 0, 0, 0.0
        self._stack, self._links = ExitStack(), dict[bytes, Any]()

    @contextmanager
    def __call__(self, layers: Layers) -> Iterator[Any]:
        key = packed(layers)
        if key not in self._links:
            self._links[key] = self._stack.enter_context(self._open(layers))
        yield self._links[key]

    @staticmethod
    def local(experts: ExpertWeights, x_TD: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        """What LocalLink makes of it on the GPU."""
        there = OnDevice(_local({0: experts}, len(experts.expert_ids)), FIRST)
        return there.combine(there.dispatch(0, x_TD, ids_TK, weights_TK))

    def compare(self, found_TD: Tensor, local_TD: Tensor, terms_TD: Tensor) -> None:
        """With LocalLink's sums of the same terms, ``terms_TD`` in size: each addition may round otherwise."""
        self._compared += 1
        self._unequal += not torch.equal(found_TD, local_TD)
        self._most = max([self._most, float((found_TD - local_TD).abs().max())] if len(found_TD) else [self._most])
        allowed_TD = ADDITIONS * torch.finfo(torch.float32).eps * terms_TD
        assert ((found_TD - local_TD).abs() <= allowed_TD).all(), (found_TD, local_TD)

    def close(self) -> None:
        if self._unequal:
            text = f"{self._unequal} of {self._compared} sums are not LocalLink's to the bit, by {self._most:g} at most"
            warnings.warn(text, stacklevel=1)
        self._stack.close()


def _local(layers: Layers, num_experts: int) -> LocalLink:
    shard = ExpertShard({layer: moved(held, FIRST) for layer, held in layers.items()}, num_experts=num_experts)
    return LocalLink(shard.by_layer(), num_experts=num_experts)


def moved(held: ExpertWeights, device: torch.device) -> ExpertWeights:
    return ExpertWeights(
        expert_ids=held.expert_ids,
        w_gate_up_E2FD=held.w_gate_up_E2FD.to(device),
        w_down_EDF=held.w_down_EDF.to(device),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A link to expert workers: by shared memory, or else over a lane. ``summed`` at the seat, or by the caller.

    ``lane``: what memory does not take goes over one, not in frames. Where workers are killed it had better not: NCCL
    never ends the opening of a lane whose other end dies, and after a few of these no more are tried.
    """

    shared: bool
    summed: bool = False
    lane: bool = True

    @contextmanager
    def linked(self, table: RoutingTable, *, seats: int | None = None, **options: Any) -> Iterator[OnDevice]:
        lanes = first_lanes() if self.lane else None
        if self.shared:
            made: Any = linked_shared(
                table,
                memory=CudaMemory(FIRST),  # the link closes it
                device=FIRST,
                unsummed=not self.summed,
                seats=seats,
                lanes=lanes,
                **options,
            )
        else:
            made = linked(table, lanes=lanes, reduced=self.summed, ready_s=CALL_S, **options)
        with made as link:
            yield OnDevice(link, FIRST)


@contextmanager
def to_workers(
    pool: GpuPool, way: Way, replicas: Sequence[int], num_experts: int, layers: Layers, **options: Any
) -> Iterator[OnDevice]:
    """Group i has ``replicas[i]`` seats, each on the next GPU."""
    facts, places = facts_of(layers), itertools.count()

    def start(number: int, group: ShardGroup) -> GpuServer:
        held = {"weights": packed(held_by(group, layers)), "experts": group.experts, "num_experts": num_experts}
        return GpuServer(pool.host(next(places)), number, shared=way.shared, **held, **facts)

    with (
        served(layers, num_experts, replicas, start, numbers=iter(pool.next_number, None)) as table,
        way.linked(table, call_s=CALL_S, unavailable_s=CALL_S, **facts, **options) as link,
    ):
        yield link


@cache
def gpu_ranks(pool: GpuPool) -> GpuRanks:
    half = pool.gpus // 2
    asking = [pool.host(place).ask for place in range(pool.gpus - 1)]
    return GpuRanks(("a",) * half + ("b",) * half, lambda rank: asking[rank - 1], timeout_s=CALL_S)


def gpu_links(num_experts: int) -> dict[str, Callable[[GpuPool], GpuLinks]]:
    """Every implementation between GPUs, by name; made when there is a pool."""

    def workers(way: Way, replicas: Sequence[int], *, another_order: bool = False) -> Callable[[GpuPool], GpuLinks]:
        def links(pool: GpuPool) -> GpuLinks:
            open_link = partial(to_workers, pool, way, replicas, num_experts)
            return GpuLinks(open_link, another_order=another_order)

        return links

    def lockstep(way: Any, slices: int = 1) -> Callable[[GpuPool], GpuLinks]:
        def links(pool: GpuPool) -> GpuLinks:
            ranks = gpu_ranks(pool)
            shape = LockstepShape(nodes=ranks.nodes, way=way, slices=slices)
            open_link = partial(dealt_link, num_experts=num_experts, shape=shape, ranks=ranks)
            return GpuLinks(open_link, another_order=way == "hierarchical")

        return links

    return {
        "shared": workers(Way(shared=True), [2, 1]),
        "shared-summed": workers(Way(shared=True, summed=True), [2]),
        "nccl": workers(Way(shared=False), [2, 1]),
        "nccl-reduced": workers(Way(shared=False, summed=True), [2], another_order=True),
        "lockstep-nccl-flat": lockstep("flat"),
        "lockstep-nccl-hierarchical": lockstep("hierarchical"),
        "lockstep-nccl-sliced": lockstep("flat", slices=2),
    }
