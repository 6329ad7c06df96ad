"""An attention worker of a measurement: steps of nothing but exchanges, in one graph. ``-m
perf.fabric.exchange.attention``.

Every step's result is compared on the device: with experts that return the rows, each layer's answer must be its input
to the bit.
"""

from __future__ import annotations

import csv
import queue
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from perf.fabric.exchange.bare_triton import stamp
from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.dense import DenseLayers
from perf.fabric.exchange.experts import serve_seat
from perf.fabric.exchange.ipc import memory_by
from perf.fabric.exchange.world import SECRET, World, device_of, log_to_stderr, whole_rows
from services.fabric.local import LocalLink
from services.fabric.shared_memory.link import SharedMemoryLink, SharedMemoryOptions
from services.fabric.shared_memory.messages import bucket_of
from services.fabric.shared_memory.peers import SharedSeat
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.link import TcpLink


class WatchedLink(SharedMemoryLink):
    """Writes down when what happened around a step that failed."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        self.phases: list[tuple[float, str]] = []
        super().__init__(*arguments, **named)

    def _on_lost(self, seat: SharedSeat) -> None:
        self._note(f"end of {seat.link.seat.number} seen")
        super()._on_lost(seat)
        self._note("abort written")

    def crowd(self, shared_gpu: bool) -> None:
        self._options = replace(self._options, shared_gpu=shared_gpu)

    def _note(self, text: str) -> None:
        self.phases.append((time.time(), text))

    def finish_step(self) -> bool:
        good = super().finish_step()
        if not good:
            self._note("step ended")
        elif self.phases and self.phases[-1][1] != "run again":
            self._note("run again")
        return good

    def begin_step(self, step: int, rows: Sequence[int]) -> None:
        failed = bool(self.phases) and self.phases[-1][1] == "step ended"
        super().begin_step(step, rows)
        if failed:
            self._note(f"begun again with {self.shared()}")


class Attention:
    def __init__(self, parent: Parent) -> None:
        facts = parent.facts
        self._parent, self._facts = parent, facts
        self._world, self._device = World(**facts["world"]), device_of(facts["gpu"])
        world = self._world
        table = world.table(0, [])
        hello = world.hello(facts["name"])
        self._link = WatchedLink(
            lambda lane: TcpLink(
                table,
                Facts(hello=hello, secret=SECRET),
                extension=lane,
                unavailable_s=5.0,
                reduced=not world.unsummed,
            ),
            table,
            memory=memory_by(facts["memory"], self._device),
            device=self._device,
            layers=list(range(world.layers)),
            layout=world.layout,
            node="here",
            options=SharedMemoryOptions(
                deadline_s=facts.get("deadline_ms", 20) / 1e3,
                unavailable_s=facts.get("unavailable_s", 10.0),
                shared_gpu=facts.get("shared_gpu", False),
            ),
        )
        self._gpu = self._device.type == "cuda"
        self._stream = torch.cuda.Stream(self._device) if self._gpu else None
        self._wrong = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._stamps = torch.zeros(2, dtype=torch.int64, device=self._device)
        self._graph: Any = None
        self._body: Callable[[], None] = lambda: None
        self._by_host = 0
        self._dense = False
        self._rows: list[int] = []
        self._step = 0
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._marks: list[tuple[float, str]] = []
        self._stop = threading.Event()

    def listen(self) -> None:
        """Handle commands in a thread: tables, marks and the end of a run take effect at once, the rest in its turn."""
        for command in self._parent.commands():
            if command["do"] == "table":
                self._link.apply(self._world.table(command["epoch"], command["seats"]))
            elif command["do"] == "mark":
                self._marks.append((time.time(), command["text"]))
            elif command["do"] == "shared":
                self._parent.report(shared=sorted(seat.link.seat.number for seat in self._link.peers.usable()))
            elif command["do"] == "stop":
                self._stop.set()
            else:
                self._commands.put(command)
        self._commands.put(None)

    def serve(self) -> None:
        doing: dict[str, Callable[..., dict[str, Any]]] = {
            "attach": self.attach, "exact": self.exact, "local": self.local, "capture": self.capture, "run": self.run,
            "profile": self.profile,
        }  # fmt: skip
        with torch.inference_mode(), torch.cuda.stream(self._stream) if self._stream else nullcontext():
            while (command := self._commands.get()) is not None:
                try:
                    self._parent.report(**doing[command.pop("do")](**command))
                except Exception as error:  # noqa: BLE001 - the parent decides
                    self._parent.report(error=f"{type(error).__name__}: {error}")
        self._link.close()

    def attach(self, seats: int, seconds: float = 60.0) -> dict[str, Any]:
        began = time.time()
        assert self._link.peers.wait_for(lambda shared: len(shared) >= seats, seconds), (
            f"{len(self._link.peers.usable())} of {seats} seats share memory"
        )
        return {"seconds": time.time() - began}

    def exact(self, rows: list[list[int]]) -> dict[str, Any]:
        """Steps without a graph, of other shapes than the graph's. Wrong elements, and steps that ran again."""
        wrong = again = 0
        for at, micro_batches in enumerate(rows):
            calls = [whole_rows(count, self._world, self._device, 100 + at) for count in micro_batches]
            _, tries = self._confirmed(micro_batches, lambda calls=calls: self._exchanges(calls, check=True))
            wrong, again = wrong + int(self._wrong), again + tries - 1
        return {"wrong": wrong, "again": again, "seats": self._link.shared()}

    def local(self, rows: int) -> dict[str, Any]:
        """Against a LocalLink of all experts on this device: greatest difference, and whether it is none. Kernels are
        chosen by how many rows there are, so it is given as many as a seat is: absent ones fill the bucket."""
        world = self._world
        every = {layer: tuple(range(world.experts)) for layer in range(world.layers)}
        local = LocalLink(world.shard(every, self._device).by_layer(), num_experts=world.experts)
        x_TD, ids_TK, _ = whole_rows(rows, world, self._device, 7)
        x_TD = torch.randn(x_TD.shape, device=self._device).to(x_TD.dtype)
        weights_TK = torch.rand(ids_TK.shape, device=self._device)
        greatest, scale, equal = 0.0, 0.0, True
        found: list[Tensor] = []

        def body() -> None:
            found[:] = [
                self._link.combine(self._link.dispatch(layer, x_TD, ids_TK, weights_TK))
                for layer in range(world.layers)
            ]

        self._confirmed([rows], body)
        more = bucket_of(rows, world.rows) - rows
        call = (
            F.pad(x_TD, (0, 0, 0, more)),
            F.pad(ids_TK, (0, 0, 0, more), value=-1),
            F.pad(weights_TK, (0, 0, 0, more)),
        )
        for layer, y_TD in enumerate(found):
            wanted_TD = local.combine(local.dispatch(layer, *call))[:rows]
            greatest = max(greatest, float((y_TD.float() - wanted_TD.float()).abs().max()))
            scale = max(scale, float(wanted_TD.float().abs().max()))
            equal = equal and torch.equal(y_TD, wanted_TD)
        return {"equal": equal, "difference": greatest, "scale": scale, "seats": self._link.shared()}

    def capture(
        self, rows: list[int], check: bool = True, dense: bool = False, shared_gpu: bool = False
    ) -> dict[str, Any]:
        self._link.crowd(shared_gpu)
        self._rows, self._dense = rows, dense
        calls = [whole_rows(count, self._world, self._device, 3) for count in rows]
        layers = DenseLayers(self._world, self._device) if dense else None
        if layers is not None:
            self._load(layers, [call[0] for call in calls])

        def body() -> None:
            if layers is None:
                self._exchanges(calls, check=check)
            else:
                self._layers([call[0] for call in calls], layers)

        self._body = body
        for _ in range(3):
            self._confirmed(rows, body)
        if not self._gpu:
            self._graph = type("Eager", (), {"replay": staticmethod(body)})
            return {}
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
            body()  # as in the step before, whose seats it names only by the control block
        return {}

    def _load(self, layers: DenseLayers, rows: list[Tensor]) -> None:
        """Every kernel between exchanges once: where a seat shares the GPU, its waiting kernels hold up the loading of
        others, and so themselves."""
        for x_TD in rows:
            layers(0, x_TD)[0].add_(x_TD)
        if self._gpu:
            stamp[(1,)](self._stamps, 0)
            torch.cuda.synchronize(self._device)

    def run(self, label: str, seconds: float = 0.0, steps: int = 1 << 40) -> dict[str, Any]:
        """Steps until the time, the count or a "stop" is reached. Durations in milliseconds, runs again included."""
        until, log = time.time() + (seconds or 1e9), []
        wrong = 0
        self._stop.clear()
        self._marks.clear()
        self._link.phases.clear()
        errors: list[str] = []
        while len(log) < steps and time.time() < until and not self._stop.is_set():
            began = time.time()
            try:
                begun_us, tries = self._confirmed(self._rows, self._replay)
            except Exception as error:  # noqa: BLE001 - the parent decides
                errors.append(f"{type(error).__name__}: {error}")
                break
            log.append((began, (time.time() - began) * 1e3, tries, begun_us, self._between_us()))
            wrong += int(self._wrong)
        self._write(label, log)
        times = sorted(entry[1] for entry in log)
        return {
            "steps": len(log), "wrong": wrong, "again": sum(entry[2] - 1 for entry in log), "errors": errors,
            "by_host": self._by_host,
            "p50_ms": _at(times, 0.5), "p99_ms": _at(times, 0.99), "max_ms": times[-1] if times else -1,
            "begin_us": statistics.median(entry[3] for entry in log) if log else -1,
            "exchange_us": statistics.median(entry[4] for entry in log) if log else -1,
            "seats": self._link.shared(), "slow": [entry for entry in log if entry[1] > 3 * _at(times, 0.5)][:60],
            "phases": self._link.phases, "marks": self._marks, "windows": self._windows(log),
        }  # fmt: skip

    def profile(self, steps: int = 5) -> dict[str, Any]:
        """Name, count, mean and total microseconds of the kernels on this GPU during some steps, seats' included."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiled:
            tries = [self._confirmed(self._rows, self._replay)[1] for _ in range(steps)]
        found = sorted(profiled.key_averages(), key=lambda entry: -entry.device_time_total)[:16]
        return {
            "again": sum(tries) - steps,
            "kernels": [
                (entry.key[:48], entry.count, round(entry.device_time, 1), round(entry.device_time_total, 1))
                for entry in found
            ],
        }

    def _confirmed(self, rows: list[int], body: Callable[[], None]) -> tuple[float, int]:
        """Microseconds that beginning took, and how often it ran."""
        tries = 0
        while True:
            tries += 1
            self._step += 1
            began = time.perf_counter()
            self._link.begin_step(self._step, rows)
            begun_us = (time.perf_counter() - began) * 1e6
            body()
            if self._link.finish_step():
                return begun_us, tries

    def _replay(self) -> None:
        """The graph, unless a group has no shared seat: then rows take the host's way."""
        if len(self._link.shared()) == self._world.groups:
            self._graph.replay()
        else:
            self._by_host += 1
            self._body()

    def _exchanges(self, calls: list[tuple[Tensor, Tensor, Tensor]], check: bool) -> None:
        self._wrong.zero_()
        rows = [call[0] for call in calls]
        last = self._world.layers - 1
        for layer in range(self._world.layers):
            handles = [
                self._link.dispatch(layer, x_TD, ids_TK, weights_TK)
                for x_TD, (_, ids_TK, weights_TK) in zip(rows, calls, strict=True)
            ]
            answers = [self._link.combine(handle) for handle in handles]
            if self._gpu and layer in (0, last):
                stamp[(1,)](self._stamps, 0 if layer == 0 else 1)
            if check:
                for x_TD, y_TD in zip(rows, answers, strict=True):
                    self._wrong += (x_TD != y_TD).sum()
            rows = answers

    def _layers(self, rows: list[Tensor], dense: DenseLayers) -> None:
        """Layers as in a model; two micro-batches take turns: one is with the experts while the other is here."""
        last = self._world.layers - 1
        handles: list[Any] = [None] * len(rows)
        for layer in range(self._world.layers):
            for at in range(len(rows)):
                if layer > 0:
                    rows[at] = rows[at] + self._link.combine(handles[at])
                if self._gpu and at == 0 and layer in (1, last):
                    stamp[(1,)](self._stamps, 0 if layer == 1 else 1)
                rows[at], *call = dense(layer, rows[at])
                handles[at] = self._link.dispatch(layer, *call)
        for handle in handles:
            self._link.combine(handle)

    def _between_us(self) -> float:
        if not self._gpu:
            return 0.0
        first, last = self._stamps.tolist()
        return float(last - first) / 1e3 / max(1, self._world.layers - (2 if self._dense else 1))

    def _windows(self, log: list[Any]) -> dict[str, Any]:
        """Durations between marks."""
        edges = [*self._marks, (time.time(), "end")]
        found = {}
        for (start, text), (end, _) in pairwise(edges):
            inside = sorted(entry[1] for entry in log if start <= entry[0] < end)
            if inside:
                found[text] = {
                    "steps": len(inside), "p50_ms": _at(inside, 0.5), "p99_ms": _at(inside, 0.99), "max_ms": inside[-1]
                }  # fmt: skip
        return found

    def _write(self, label: str, log: list[Any]) -> None:
        with (Path(self._facts["out"]) / f"steps-{self._facts['name']}-{label}.csv").open("w") as file:
            writer = csv.writer(file)
            writer.writerow(["unix_s", "ms", "runs", "begin_us", "exchange_us"])
            typical = _at(sorted(entry[1] for entry in log), 0.5)
            writer.writerows(entry for at, entry in enumerate(log) if at % 50 == 0 or entry[1] > 2 * typical)


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))] if ordered else -1.0


def main() -> None:
    parent = Parent()
    log_to_stderr()
    worker = Attention(parent)
    facts = parent.facts
    port = 0
    if "group" in facts:  # co-located: the seat of a group in the same process, on the same GPU
        port = serve_seat(
            World(**facts["world"]), device_of(facts["gpu"]), facts["seat"], facts["group"], facts["memory"]
        ).address[1]
    parent.report(port=port, seat=facts.get("seat"), group=facts.get("group"))
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.serve()


if __name__ == "__main__":
    main()
