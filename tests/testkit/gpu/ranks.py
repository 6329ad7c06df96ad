"""Ranks in lock-step on GPUs, each in a process of its own, as they are in the product."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import PrefixStore

from services.fabric.lockstep.build import LockstepShape
from services.fabric.lockstep.nccl import NcclWire, nccl_group
from services.model.experts import ExpertWeights
from services.placement import Placement
from testkit.fabric.lockstep import CONNECT_S, Ranks, RowsLink, connected, opened
from testkit.gpu.packing import packed, unpacked


class Member:
    """A rank on one GPU: its wire, the links over it, and what they have under way."""

    def __init__(self, rank: int, nodes: Sequence[str], port: int, device: torch.device, timeout_s: float) -> None:
        store, control = connected(rank, nodes, port, timeout_s)
        data = nccl_group(PrefixStore("nccl", store), rank, len(nodes), device, CONNECT_S)
        self._wire = NcclWire(data, control, device=device, timeout_s=timeout_s)
        self._links: list[Any] = []
        self._handles: dict[int, Any] = {}
        self._numbers = itertools.count()

    def open(self, weights: bytes, placement: Placement, shape: LockstepShape, num_experts: int) -> int:
        layers = unpacked(weights, self._wire.device)
        self._links.append(opened(self._wire, layers, placement, shape, num_experts, self._wire.device))
        return len(self._links) - 1

    def dispatch(self, link: int, layer: int, rows: Sequence[Tensor]) -> int:
        number = next(self._numbers)
        self._handles[number] = self._links[link].dispatch(layer, *(part.to(self._wire.device) for part in rows))
        return number

    def combine(self, link: int, handle: int) -> Tensor:
        found_TD: Tensor = self._links[link].combine(self._handles.pop(handle)).cpu()
        return found_TD


class MemberLink:
    """A link of a :class:`Member`, wherever that is: ``ask`` has it do something."""

    def __init__(self, ask: Callable[..., Any], link: int) -> None:
        self._ask, self._link = ask, link

    def dispatch(self, layer: int, *rows: Tensor) -> int:
        return int(self._ask("dispatch", link=self._link, layer=layer, rows=[part.clone() for part in rows]))

    def combine(self, handle: int) -> Tensor:
        found_TD: Tensor = self._ask("combine", link=self._link, handle=handle)
        return found_TD


class GpuRanks(Ranks):
    """A rank on each GPU: the first here, each other one where ``asking`` of its number has it done."""

    def __init__(self, nodes: Sequence[str], asking: Callable[[int], Callable[..., Any]], *, timeout_s: float) -> None:
        self._asking: list[Callable[..., Any]] = [self._here, *(asking(rank) for rank in range(1, len(nodes)))]
        super().__init__(nodes, timeout_s=timeout_s)

    def _here(self, what: str, **arguments: Any) -> Any:
        if what == "join":
            self._first = Member(device=torch.device("cuda", 0), **arguments)
            return None
        return getattr(self._first, what)(**arguments)

    def _wire(self, rank: int, timeout_s: float) -> None:
        self._asking[rank]("join", rank=rank, nodes=self.nodes, port=self.store.port, timeout_s=timeout_s)

    def links(
        self, layers: Mapping[int, ExpertWeights], placement: Placement, shape: LockstepShape, num_experts: int
    ) -> list[RowsLink]:
        whole = {"weights": packed(layers), "placement": placement, "shape": shape, "num_experts": num_experts}
        return [MemberLink(ask, ask("open", **whole)) for ask in self._asking]
