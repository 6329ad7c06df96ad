"""NCCL's exchanges of the same sizes, in graphs. ``-m perf.fabric.exchange.nccl``, one for each GPU."""

from __future__ import annotations

import datetime
import os
from collections.abc import Callable

import torch
import torch.distributed as dist

from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.world import device_of

CALLS, REPLAYS = 48, 20


def main() -> None:
    parent = Parent()
    facts = parent.facts
    os.environ.setdefault("NCCL_LAUNCH_ORDER_IMPLICIT", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    device, rank, ranks = device_of(facts["gpu"]), facts["rank"], facts["ranks"]
    dist.init_process_group(
        "nccl", init_method=f"tcp://127.0.0.1:{facts['port']}", rank=rank, world_size=ranks, device_id=device,
        timeout=datetime.timedelta(seconds=30),
    )  # fmt: skip
    for kib in facts["kib"]:
        for name, call in _exchanges(kib, rank, ranks, device).items():
            parent.report(what=name, kib=kib, us=_timed(call, device))
    parent.report(what="end")
    os._exit(0)


def _exchanges(kib: int, rank: int, ranks: int, device: torch.device) -> dict[str, Callable[[], None]]:
    """Round trips: from the first half of the ranks to the second and back; from each to all and back."""
    rows = torch.randn(kib << 9, device=device).bfloat16()
    theirs = [torch.empty_like(rows) for _ in range(ranks)]
    out = torch.randn(ranks * rows.numel(), device=device).bfloat16()
    back = torch.empty_like(out)
    half = ranks // 2
    others = range(half, ranks) if rank < half else range(half)

    def bipartite() -> None:
        for sends in (rank < half, rank >= half):
            one = dist.isend if sends else dist.irecv
            for work in dist.batch_isend_irecv(
                [dist.P2POp(one, rows if sends else theirs[peer], peer) for peer in others]
            ):
                work.wait()

    def all_to_all() -> None:
        dist.all_to_all_single(back, out)
        dist.all_to_all_single(out, back)

    return {"bipartite": bipartite, "all_to_all": all_to_all}


def _timed(call: Callable[[], None], device: torch.device) -> float:
    """Microseconds of one call, the median over replays."""
    stream = torch.cuda.Stream(device)
    with torch.cuda.stream(stream):
        for _ in range(3):
            call()
        stream.synchronize()
        dist.barrier()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(CALLS):
                call()
        times = []
        for _ in range(REPLAYS):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            end.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / CALLS)
    torch.cuda.synchronize()
    dist.barrier()
    return sorted(times)[len(times) // 2]


if __name__ == "__main__":
    main()
