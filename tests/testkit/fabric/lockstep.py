"""Meshes within one process, a thread per rank. One ExpertLink stands for all: it deals the rows out to the ranks."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore

from services.fabric.link import CountingLink, SynchronousLink
from services.fabric.lockstep.build import LockstepShape, lockstep_link
from services.fabric.lockstep.gloo import GlooWire, gloo_group
from services.model.experts import ExpertShard, ExpertWeights, sliced
from services.placement import Placement, place_experts

MAX_ROWS = 64
LOOPBACK = "127.0.0.1"
CONNECT_S = 60.0
"""However short the waits of an exchange are to be, ranks may take so long to find one another."""


class RowsLink(Protocol):
    """What of an ExpertLink the rows need that are dealt out."""

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor, /) -> Any: ...

    def combine(self, handle: Any, /) -> Tensor: ...


def connected(rank: int, nodes: Sequence[str], port: int, timeout_s: float) -> tuple[TCPStore, GlooWire]:
    """A rank's store and wire."""
    client = TCPStore(LOOPBACK, port, is_master=False, wait_for_workers=False)
    store = PrefixStore("lockstep", client)
    group = gloo_group(store, rank, len(nodes), host=LOOPBACK, timeout_s=max(timeout_s, CONNECT_S))
    near = [other for other, node in enumerate(nodes) if node == nodes[rank]]
    return client, GlooWire(group, near=near, timeout_s=timeout_s)


def opened(
    wire: Any,
    layers: Mapping[int, ExpertWeights],
    placement: Placement,
    shape: LockstepShape,
    num_experts: int,
    device: torch.device | None = None,
) -> CountingLink[Any]:
    """The link of ``wire``'s rank, which holds its part of the experts on ``device``."""
    held = part_of(layers, placement, shape, wire.rank, num_experts, device).by_layer()
    return lockstep_link(wire, held, placement=placement, num_experts=num_experts, shape=shape, max_rows=MAX_ROWS)


class Ranks:
    """A thread per rank, and their wires."""

    def __init__(self, nodes: Sequence[str], *, timeout_s: float = 20.0) -> None:
        self.nodes = tuple(nodes)
        self.threads = [ThreadPoolExecutor(1, thread_name_prefix=f"rank-{rank}") for rank in range(len(nodes))]
        self.store = TCPStore(LOOPBACK, 0, is_master=True, wait_for_workers=False)
        self.wires: list[Any] = self.each(lambda rank: self._wire(rank, timeout_s))

    def _wire(self, rank: int, timeout_s: float) -> Any:
        return connected(rank, self.nodes, self.store.port, timeout_s)[1]

    def links(
        self, layers: Mapping[int, ExpertWeights], placement: Placement, shape: LockstepShape, num_experts: int
    ) -> Sequence[RowsLink]:
        return [opened(wire, layers, placement, shape, num_experts) for wire in self.wires]

    def each(self, work: Any) -> list[Any]:
        """``work(rank)`` on every rank's thread at once; the results by rank."""
        futures = [thread.submit(work, rank) for rank, thread in enumerate(self.threads)]
        return [future.result() for future in futures]

    def cut(self, rank: int) -> None:
        """Close its connections, as its death would."""
        self.wires[rank].close()

    def close(self) -> None:
        for thread in self.threads:
            thread.shutdown()


@cache
def shared_ranks(nodes: tuple[str, ...]) -> Ranks:
    """Made once: connecting takes longer than a test, and a test that passes leaves nothing under way."""
    return Ranks(nodes)


class DealtLink(SynchronousLink):
    """The rows of one dispatch are dealt out to the ranks in runs; those for which none is left take part without."""

    def __init__(self, ranks: Ranks, links: Sequence[Any]) -> None:
        self._ranks, self.links = ranks, links

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> list[Future[Any]]:
        size = max(1, -(-len(x_TD) // len(self.links)))
        ranks = zip(self._ranks.threads, self.links, strict=True)
        return [
            thread.submit(
                link.dispatch, layer, *(rows[at * size :][:size] for rows in (x_TD, expert_ids_TK, weights_TK))
            )
            for at, (thread, link) in enumerate(ranks)
        ]

    def combine(self, handles: list[Future[Any]]) -> Tensor:
        futures = [
            thread.submit(lambda link=link, handle=handle: link.combine(handle.result(0)))
            for thread, link, handle in zip(self._ranks.threads, self.links, handles, strict=True)
        ]
        return torch.cat([future.result() for future in futures])


@contextmanager
def dealt_link(
    layers: Mapping[int, ExpertWeights],
    num_experts: int,
    shape: LockstepShape,
    *,
    slots: int | None = None,
    ranks: Ranks | None = None,
) -> Iterator[DealtLink]:
    """Ranks with the experts of ``layers`` placed evenly; ``slots`` per layer and group of ranks, for replicas."""
    ranks = ranks or shared_ranks(shape.nodes)
    even = {layer: [1.0] * num_experts for layer in layers}
    placement = place_experts(even, shape.groups, slots or -(-num_experts // shape.groups))
    yield DealtLink(ranks, ranks.links(layers, placement, shape, num_experts))


def part_of(
    layers: Mapping[int, ExpertWeights],
    placement: Placement,
    shape: LockstepShape,
    rank: int,
    num_experts: int,
    device: torch.device | None = None,
) -> ExpertShard:
    """What ``rank`` holds."""
    held = {}
    for layer, weights in layers.items():
        ids = placement[layer][shape.group_of(rank)]
        mine = ExpertWeights(
            expert_ids=ids,
            w_gate_up_E2FD=weights.w_gate_up_E2FD[list(ids)].contiguous().to(device),
            w_down_EDF=weights.w_down_EDF[list(ids)].contiguous().to(device),
        )
        held[layer] = sliced(mine, shape.slice_of(rank), shape.slices)
    return ExpertShard(held, num_experts=num_experts)
