"""An attention worker with the real engine over the shared memory link, by graph. ``-m
perf.fabric.exchange.pocket_attention``.

It answers the recorded prompts in waves: after a wave's prompts its steps only decode, and each answer is compared.
"""

from __future__ import annotations

import queue
import threading
import time
from itertools import pairwise
from typing import Any

import torch
from testkit.gpu.decode_bench import request
from testkit.gpu.recorded_graph import record

from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.ipc import memory_by
from perf.fabric.exchange.pocket import MAX_TOKENS, POCKET, SPEC, pocket_world, records, said
from perf.fabric.exchange.world import SECRET, device_of, log_to_stderr
from services.attention.step.cuda_graphs import CudaCapture
from services.attention.step.engine import Engine, EngineOptions
from services.fabric.shared_memory.link import SharedMemoryLink, SharedMemoryOptions
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.link import TcpLink
from services.model.dense import DenseModel
from services.model.weights import load_dense


class Decoding:
    def __init__(self, parent: Parent) -> None:
        facts = parent.facts
        self._parent, self._device = parent, device_of(facts["gpu"])
        self._world = world = pocket_world(facts["rows"])
        table = world.table(0, [])
        self._link = SharedMemoryLink(
            lambda lane: TcpLink(
                table,
                Facts(hello=world.hello(facts["name"]), secret=SECRET),
                extension=lane,
                call_s=2.0,
                unavailable_s=10.0,
            ),
            table,
            memory=memory_by("vmm", self._device),
            device=self._device,
            layers=list(range(world.layers)),
            layout=world.layout,
            node="here",
            options=SharedMemoryOptions(deadline_s=facts["deadline_ms"] / 1e3),
        )
        dense = load_dense(POCKET / "model", SPEC, dtype=torch.float32, device=self._device)
        self._engine: Engine[Any] = Engine(
            model=DenseModel(SPEC, dense),
            link=self._link,
            options=EngineOptions(
                max_num_seqs=facts["rows"], max_num_batched_tokens=4096, kv_blocks=1024, max_model_len=512,
                prefix_cache=False,
            ),
            clock=lambda: 0,
            capture=CudaCapture(self._device) if self._device.type == "cuda" else record,
        )  # fmt: skip
        self._commands: queue.SimpleQueue[dict[str, Any] | None] = queue.SimpleQueue()
        self._marks: list[tuple[float, str]] = []
        self._stop = threading.Event()

    def listen(self) -> None:
        """Handle commands in a thread: tables, marks and the end take effect at once, the rest in its turn."""
        for command in self._parent.commands():
            match command:
                case {"do": "table", "epoch": epoch, "seats": seats}:
                    self._link.apply(self._world.table(epoch, seats))
                case {"do": "mark", "text": text}:
                    self._marks.append((time.time(), text))
                case {"do": "shared"}:
                    usable = sorted(seat.link.seat.number for seat in self._link.peers.usable())
                    self._parent.report(usable=usable, used=list(self._link.shared().values()))
                case {"do": "stop"}:
                    self._stop.set()
                case _:
                    self._commands.put(command)
        self._commands.put(None)

    def serve(self) -> None:
        while (command := self._commands.get()) is not None:
            try:
                self._parent.report(**getattr(self, command.pop("do"))(**command))
            except Exception as error:  # noqa: BLE001 - the parent decides
                self._parent.report(error=f"{type(error).__name__}: {error}")
        self._link.close()

    def attach(self, seats: int) -> dict[str, Any]:
        began = time.time()
        assert self._link.peers.wait_for(lambda shared: len(shared) >= seats, 60), "no shared memory"
        attached = time.time()
        self._engine.prepare()
        return {"attach_s": attached - began, "prepare_s": time.time() - attached, "graphs": self._graphs}

    def run(self, for_s: float) -> dict[str, Any]:
        """Waves until the time is up or a "stop" comes."""
        self._stop.clear()
        self._marks.clear()
        wanted, answers, wrong, waves = records(), 0, [], 0
        steps: list[tuple[float, float, bool, bool]] = []
        graphs, before, until = self._graphs, self._engine.stats(), time.time() + for_s
        size = self._world.rows
        while time.time() < until and not self._stop.is_set():
            wave = [wanted[(waves * size + at) % len(wanted)] for at in range(size)]
            found = self._wave(waves, wave, steps)
            for at, one in enumerate(wave):
                answers += 1
                if said(found[at]) != said(one["output_ids"]):
                    wrong.append(one["id"])
            waves += 1
        after = self._engine.stats()
        return {
            "waves": waves, "answers": answers, "wrong": wrong[:5], "wrong_count": len(wrong),
            "graphs_before": graphs, "graphs_after": self._graphs, "steps": after.steps - before.steps,
            "replayed": after.graph_steps - before.graph_steps, "windows": self._windows(steps),
        }  # fmt: skip

    @property
    def _graphs(self) -> int:
        return self._engine.stats().graphs

    def _wave(self, wave: int, asked: list[dict[str, Any]], steps: list[Any]) -> list[list[int]]:
        found: list[list[int]] = [[] for _ in asked]
        for at, one in enumerate(asked):
            self._engine.add(request(f"{wave}/{at}", one["prompt_ids"], MAX_TOKENS, ignore_eos=False))
        while self._engine.has_work:
            began, before = time.time(), self._engine.stats()
            for event in self._engine.step():
                assert event.error is None, event.error
                if event.token_id is not None:
                    found[int(event.request_id.partition("/")[2])].append(event.token_id)
            after = self._engine.stats()
            decodes = after.prefill_tokens == before.prefill_tokens
            steps.append((began, (time.time() - began) * 1e3, decodes, after.graph_steps > before.graph_steps))
        return found

    def _windows(self, steps: list[tuple[float, float, bool, bool]]) -> dict[str, Any]:
        """Durations of decode steps between marks, milliseconds."""
        edges = [(0.0, "start"), *self._marks, (time.time(), "end")]
        found = {}
        for (start, text), (end, _) in pairwise(edges):
            inside = [step for step in steps if start <= step[0] < end]
            if decodes := sorted(step[1] for step in inside if step[2]):
                found[text] = {
                    "decode_steps": len(decodes), "eager": sum(step[2] and not step[3] for step in inside),
                    "p50_ms": round(decodes[len(decodes) // 2], 3),
                    "p99_ms": round(decodes[len(decodes) * 99 // 100], 3),
                    "longest_ms": round(decodes[-1], 3),
                    "longest_with_prompts_ms": round(max((s[1] for s in inside if not s[2]), default=0.0), 3),
                }  # fmt: skip
        return found


def main() -> None:
    parent = Parent()
    log_to_stderr()
    worker = Decoding(parent)
    parent.report(ready=True)
    threading.Thread(target=worker.listen, daemon=True).start()
    worker.serve()


if __name__ == "__main__":
    main()
