"""Ranks in lock-step over NCCL: compared with one GPU, and timed, flat, hierarchical and sliced. Needs 2 or more GPUs.

    PYTHONPATH=.:tests:kernels python perf/fabric/lockstep_nccl.py [--gpus N]

One process per GPU. Nodes are simulated (the first half of the GPUs is one, the rest the other), so that the
hierarchical exchange has something to cross; its time on one machine says what its hops cost, not what they save.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch
import torch.multiprocessing as mp
from testkit.fabric.lockstep import part_of
from torch import Tensor
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from services.fabric.local import LocalLink
from services.fabric.lockstep.build import LockstepShape, lockstep_link
from services.fabric.lockstep.gloo import GlooWire, gloo_group
from services.fabric.lockstep.nccl import NcclWire, nccl_group
from services.model.experts import ExpertShard, ExpertWeights
from services.placement import place_experts

HIDDEN, WIDTH, EXPERTS, TOP_K = 2048, 768, 128, 8
TOKENS = (0, 1, 32, 256, 2048)
TIMEOUT_S = 60.0
REPEATS = 30


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpus", type=int, default=torch.cuda.device_count())
    gpus = parser.parse_args().gpus
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    mp.spawn(_rank, args=(gpus, store.port), nprocs=gpus)


def _rank(rank: int, gpus: int, port: int) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    nodes = tuple("a" if other < gpus // 2 else "b" for other in range(gpus))
    near = [other for other in range(gpus) if nodes[other] == nodes[rank]]
    group = gloo_group(PrefixStore("gloo", store), rank, gpus, host="127.0.0.1", timeout_s=TIMEOUT_S)
    control = GlooWire(group, near=near, timeout_s=TIMEOUT_S)
    data = nccl_group(PrefixStore("nccl", store), rank, gpus, device, TIMEOUT_S)
    wire = NcclWire(data, control, device=device, timeout_s=TIMEOUT_S)
    experts = _experts(device)
    local = LocalLink(ExpertShard({0: experts}, num_experts=EXPERTS).by_layer(), num_experts=EXPERTS)
    for way, slices in (("flat", 1), ("hierarchical", 1), ("flat", 2)):
        link = _link(way, slices, wire, nodes, experts)
        for tokens in TOKENS:
            batch = _rows(tokens + 3 * rank if tokens else 0, device, seed=rank)
            with torch.inference_mode():
                error = _error(link.combine(link.dispatch(0, *batch)), local.combine(local.dispatch(0, *batch)))
                took_us = _time_us(link, batch, control)
            if rank == 0:
                print(
                    f"{way:12s} slices {slices}  {tokens:5d} rows a rank  relative error {error:.1e}  {took_us:8.0f} us"
                )
            assert error < 2e-2, "the experts answer as on one GPU"


def _link(way: Any, slices: int, wire: NcclWire, nodes: tuple[str, ...], experts: ExpertWeights) -> Any:
    shape = LockstepShape(nodes=nodes, way=way, slices=slices)
    placement = place_experts({0: [1.0] * EXPERTS}, shape.groups, -(-EXPERTS // shape.groups))
    shard = part_of({0: experts}, placement, shape, wire.rank, EXPERTS)
    return lockstep_link(
        wire,
        shard.by_layer(),
        placement=placement,
        num_experts=EXPERTS,
        shape=shape,
        max_rows=max(TOKENS) + 3 * len(nodes),
    )


def _time_us(link: Any, batch: tuple[Tensor, Tensor, Tensor], control: GlooWire) -> float:
    """Median time of one layer's exchange with its experts, from one to the next."""
    times = []
    control.agree([0])
    for _ in range(REPEATS):
        began = time.perf_counter()
        link.combine(link.dispatch(0, *batch))
        torch.cuda.synchronize()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1e6


def _error(found_TD: Tensor, expected_TD: Tensor) -> float:
    if not len(found_TD):
        return 0.0
    return float((found_TD.float() - expected_TD.float()).norm() / expected_TD.float().norm())


def _experts(device: torch.device) -> ExpertWeights:
    generator = torch.Generator(device=device).manual_seed(0)
    shape_in, shape_down = (EXPERTS, 2 * WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)
    return ExpertWeights(
        expert_ids=tuple(range(EXPERTS)),
        w_gate_up_E2FD=(torch.randn(shape_in, generator=generator, device=device) / HIDDEN**0.5).bfloat16(),
        w_down_EDF=(torch.randn(shape_down, generator=generator, device=device) / WIDTH**0.5).bfloat16(),
    )


def _rows(count: int, device: torch.device, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator(device=device).manual_seed(seed)
    chosen = torch.rand(count, EXPERTS, generator=generator, device=device).topk(TOP_K, dim=1)
    x_TD = torch.randn(count, HIDDEN, generator=generator, device=device).bfloat16()
    return x_TD, chosen.indices, torch.softmax(chosen.values, dim=1)


if __name__ == "__main__":
    main()
