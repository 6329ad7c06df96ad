"""What experts cost next to kernels that wait on the same GPU, as in a colocated worker. ``-m
perf.fabric.exchange.crowd``.

A graph of expert calls, timed alone, four at once on streams of their own, and while waiting programs are resident.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from moe_kernels.exchange.layout import ANSWERS, DEADLINE, LAST, WORDS
from moe_kernels.exchange.op import sum_answers, take_rows
from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.world import World, device_of, whole_rows

CALLS, SPIN_MS = 12, 30
SHARES = (4, 2)


class Crowd:
    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._world = World(groups=1, rows=1024, compute="shard", micro_batches=1)
        self._streams = [torch.cuda.Stream(device) for _ in range(5)]
        self._answers = torch.zeros(self._world.layout.answers_bytes, dtype=torch.uint8, device=device)
        self._inbox = torch.zeros(self._world.layout.inbox_bytes, dtype=torch.uint8, device=device)
        self._group_of_E = torch.zeros(self._world.experts, dtype=torch.int32, device=device)
        self._counts_E = torch.zeros(self._world.experts, dtype=torch.int64, device=device)
        self._taken_RK = torch.zeros(1024, self._world.slots, dtype=torch.int32, device=device)

    def measure(self) -> Iterator[dict[str, float]]:
        for share in SHARES:
            experts = tuple(range(self._world.experts // share))
            shard = self._world.shard(dict.fromkeys(range(4), experts), self._device)
            for rows in (8, 32, 128, 512):
                graphs = [self._captured(shard.forward, rows, stream) for stream in self._streams[:4]]
                found = {"share": share, "rows": rows, "alone_us": self._timed(graphs[:1], None)}
                found["four_us"] = self._timed(graphs, None)
                for programs in (32, 128):
                    found[f"next_to_{programs}_us"] = self._timed(graphs[:1], self._answers_spin(programs, False))
                found["next_to_one_us"] = self._timed(graphs[:1], self._answers_spin(128, True))
                found["next_to_take_us"] = self._timed(graphs[:1], self._take_spin())
                yield found

    def _captured(
        self, forward: Callable[..., torch.Tensor], rows: int, stream: torch.cuda.Stream
    ) -> torch.cuda.CUDAGraph:
        call = whole_rows(rows, self._world, self._device, 5)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            for layer in range(4):
                forward(layer, *call)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            for at in range(CALLS):
                forward(at % 4, *call)
        return graph

    def _timed(self, graphs: list[torch.cuda.CUDAGraph], spin: Callable[[], None] | None) -> float:
        """Microseconds per call of each graph, the best of three."""
        best = 1e9
        for _ in range(3):
            torch.cuda.synchronize()
            if spin is not None:
                with torch.cuda.stream(self._streams[4]):
                    spin()
            edges = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in graphs]
            for graph, stream, (first, last) in zip(graphs, self._streams, edges, strict=False):
                with torch.cuda.stream(stream):
                    first.record()
                    graph.replay()
                    last.record()
            torch.cuda.synchronize()
            best = min(best, max(edges[0][0].elapsed_time(last) for _, last in edges) * 1e3 / CALLS)
        return best

    def _control(self) -> torch.Tensor:
        words = torch.zeros(WORDS, dtype=torch.int64)
        words[DEADLINE], words[LAST], words[ANSWERS] = SPIN_MS * 1_000_000, 1 << 40, self._answers.data_ptr()
        return words.to(self._device)

    def _answers_spin(self, programs: int, shared_gpu: bool) -> Callable[[], None]:
        ids_TK = torch.zeros(programs, self._world.slots, dtype=torch.int64, device=self._device)
        weights_TK = torch.ones(ids_TK.shape, device=self._device)

        def spin() -> None:
            sum_answers(
                ids_TK, weights_TK, self._group_of_E, self._control(), layout=self._world.layout, groups=1,
                bucket=programs, exchange=0, micro_batch=0, shared_gpu=shared_gpu,
            )  # fmt: skip

        return spin

    def _take_spin(self) -> Callable[[], None]:
        def spin() -> None:
            take_rows(
                self._inbox, self._taken_RK, self._counts_E, self._control(), layout=self._world.layout, bucket=1024,
                exchange=0, micro_batch=0,
            )  # fmt: skip

        return spin


def main() -> None:
    parent = Parent()
    with torch.inference_mode():
        for found in Crowd(device_of(parent.facts["gpu"])).measure():
            parent.report(**found)
    parent.report(end=True)


if __name__ == "__main__":
    main()
