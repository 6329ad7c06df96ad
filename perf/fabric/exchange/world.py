"""What attention and expert workers of a measurement share: shapes, the routing table, what experts compute."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_kernels.exchange.layout import Layout
from services.fabric.tcp.frames import NAMES
from services.fabric.tcp.handshake import Hello
from services.model.experts import ExpertShard, ExpertWeights
from services.routing import RoutingTable, Seat, ShardGroup, even_groups

SECRET = b"one secret for all workers"


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """``compute``: identity (weighted sum of copies), pass (rows as they are), shard (random weights of this size)."""

    hidden: int = 2048
    width: int = 768
    experts: int = 128
    slots: int = 8
    layers: int = 48
    groups: int = 1
    rows: int = 64
    dtype: str = "bfloat16"
    micro_batches: int = 2
    unsummed: bool = False
    compute: str = "identity"

    @property
    def torch_dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self.dtype)
        return dtype

    @property
    def layout(self) -> Layout:
        return Layout(
            rows=self.rows,
            hidden=self.hidden,
            slots=self.slots,
            dtype=self.torch_dtype,
            micro_batches=self.micro_batches,
            unsummed=self.unsummed,
        )

    def shard_groups(self) -> tuple[ShardGroup, ...]:
        return even_groups(list(range(self.layers)), self.experts, self.groups)

    def table(self, epoch: int, seats: Sequence[dict[str, Any]]) -> RoutingTable:
        listed = tuple(
            Seat(number=seat["seat"], worker=f"w{seat['seat']}", group=seat["group"], host="127.0.0.1",
                 port=seat["port"], node="here")
            for seat in seats
        )  # fmt: skip
        return RoutingTable(
            epoch=epoch, fingerprint="bench", num_experts=self.experts, groups=self.shard_groups(), seats=listed
        )

    def hello(self, worker: str, seat: int = -1) -> Hello:
        return Hello(
            fingerprint="bench",
            worker=worker,
            hidden=self.hidden,
            dtype=NAMES[self.torch_dtype],
            seat=seat,
            package="0",
        )

    def shard(self, experts: dict[int, tuple[int, ...]], device: torch.device) -> ExpertShard:
        """The same random weights in every process; a few layers' worth of different ones, reused, for large models."""
        made = {}
        layers = {}
        for layer, ids in experts.items():
            seed = layer % 4
            if (seed, ids) not in made:
                made[seed, ids] = self._weights(seed, ids, device)
            layers[layer] = made[seed, ids]
        return ExpertShard(layers, num_experts=self.experts)

    def _weights(self, seed: int, ids: tuple[int, ...], device: torch.device) -> ExpertWeights:
        def draw(expert: int, rows: int, columns: int, salt: int) -> Tensor:
            generator = torch.Generator(device).manual_seed((seed * 1000 + expert) * 2 + salt)
            drawn = torch.randn(rows, columns, generator=generator, device=device) / columns**0.5
            return drawn.to(self.torch_dtype)

        return ExpertWeights(
            expert_ids=ids,
            w_gate_up_E2FD=torch.stack([draw(expert, 2 * self.width, self.hidden, 0) for expert in ids]),
            w_down_EDF=torch.stack([draw(expert, self.hidden, self.width, 1) for expert in ids]),
        )


def identity(_layer: int, x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    held_R1 = torch.where(ids_RK >= 0, weights_RK, 0).sum(1, keepdim=True)
    return (x_RD.float() * held_R1).to(x_RD.dtype)


def as_it_is(_layer: int, x_RD: Tensor, _ids_RK: Tensor, _weights_RK: Tensor) -> Tensor:
    return x_RD


def whole_rows(rows: int, world: World, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """Small whole numbers, distinct experts, dyadic weights that add up to 1: every partial sum is exact."""
    generator = torch.Generator().manual_seed(seed)
    x_TD = torch.randint(-8, 9, (rows, world.hidden), generator=generator).to(device, world.torch_dtype)
    ids_TK = torch.rand(rows, world.experts, generator=generator).topk(world.slots, dim=1).indices.to(device)
    parts = [2.0 ** -(slot + 1) for slot in range(world.slots - 1)]
    uneven = world.dtype == "float32"
    weights_K = torch.tensor([*parts, 1 - sum(parts)] if uneven else [1 / world.slots] * world.slots)
    return x_TD, ids_TK, weights_K.expand(rows, world.slots).contiguous().to(device)


def log_to_stderr() -> None:
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s")


def device_of(gpu: int) -> torch.device:
    if gpu < 0:
        torch.set_num_threads(1)
        return torch.device("cpu")
    torch.cuda.set_device(gpu)
    return torch.device("cuda", gpu)
