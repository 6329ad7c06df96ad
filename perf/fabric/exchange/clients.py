"""Several attention workers at one seat of one GPU, alone and in joint steps. ``-m perf.fabric.exchange.clients``.

Attention is a pause on a stream of the client, as if it was computed on other GPUs; nothing crosses a link. The seat
has the share of Qwen3-30B-A3B's experts that one of as many GPUs as there are clients would have, and every row as many
of its slots.
"""

from __future__ import annotations

import random
import statistics
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from perf.fabric.exchange.bare_triton import stamp
from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.experts import serve_seat
from perf.fabric.exchange.ipc import memory_by
from perf.fabric.exchange.world import SECRET, World, device_of, identity, log_to_stderr, whole_rows
from services.experts.serving import JOIN_ROWS
from services.fabric.shared_memory.joint import policy as symm_tempo
from services.fabric.shared_memory.link import SharedMemoryLink, SharedMemoryOptions
from services.fabric.shared_memory.server import Limits, SharedMemoryServer
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.server import ExpertServer

STEPS, LAST, LAYERS, CYCLES_PER_US = 260, 130, 24, 1980
"""Times are those of the last steps of each client."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """``pause_us``: of attention in each layer. ``way``: alone, auto (as measured) or together (always, as far as steps
    begin together). ``check``: experts multiply the rows by a factor. ``stops``: the first client gives every third
    step up in the middle, then runs it again."""

    world: World
    clients: int
    pause_us: int
    way: str
    check: bool = False
    stops: bool = False


def factor_of(layer: int) -> int:
    return 1 + layer % 2


def by_layer(layer: int, x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """Experts of a layer multiply by its factor: whole numbers stay exact, also in bfloat16."""
    return identity(layer, x_RD, ids_RK, weights_RK) * factor_of(layer)


class Client:
    """One attention worker; its steps run in a thread of their own."""

    def __init__(self, number: int, case: Case, device: torch.device, server: ExpertServer, memory: str) -> None:
        world, self._case, self._device, self._number = case.world, case, device, number
        table = world.table(1, [{"seat": 0, "group": 0, "port": server.address[1]}])
        hello = world.hello(f"client{number}")
        self.link = SharedMemoryLink(
            lambda lane: TcpLink(table, Facts(hello=hello, secret=SECRET), extension=lane, unavailable_s=5.0),
            table,
            memory=memory_by(memory, device),
            device=device,
            layers=list(range(world.layers)),
            layout=world.layout,
            node="here",
            options=SharedMemoryOptions(
                deadline_s=0.02 if device.type == "cuda" else 1.0, shared_gpu=device.type == "cuda"
            ),
        )
        self._gpu = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self._gpu else None
        self._calls = whole_rows(world.rows, world, device, number)
        self._wrong = torch.zeros(1, dtype=torch.int64, device=device)
        self._steps = torch.zeros(1, dtype=torch.int64, device=device)
        self._stamps = torch.zeros(2, dtype=torch.int64, device=device)
        self._graph: Any = None
        self.found: dict[str, Any] = {}

    def prepare(self) -> None:
        if not self._gpu:
            return
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            rows_TD = self._calls[0] + (self._steps % 61 + 1)
            self._wrong += (rows_TD != rows_TD * factor_of(1)).sum()
            self._steps += 1
            torch.cuda._sleep(1)
            stamp[(1,)](self._stamps, 0)
            self._stream.synchronize()
            self._confirmed(self._layers)
            self._graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self._graph, stream=self._stream, capture_error_mode="thread_local"):
                self._layers()
            self._confirmed(self._replay)

    def run(self, begin: threading.Barrier) -> None:
        """Steps, one after the other, from a random moment on."""
        begin.wait(60)
        time.sleep(random.random() * 0.01)
        body = self._replay if self._gpu else self._layers
        took_ms, layer_us, wrong, again = [], [], 0, 0
        with torch.inference_mode(), torch.cuda.stream(self._stream):
            for number in range(STEPS):
                if self._case.stops and self._number == 0 and number % 3 == 0:
                    self._stop_amid(body)
                began = time.perf_counter()
                again += self._confirmed(body) - 1
                took_ms.append((time.perf_counter() - began) * 1e3)
                first, last = self._stamps.tolist()
                layer_us.append((last - first) / 1e3 / (LAYERS - 1))
                wrong += int(self._wrong)
        took_ms = sorted(took_ms[-LAST:])
        self.found = {
            "layer_us": statistics.median(layer_us[-LAST:]), "p50_ms": took_ms[LAST // 2], "p99_ms": took_ms[-2],
            "max_ms": took_ms[-1], "wrong": wrong, "again": again,
        }  # fmt: skip

    def _replay(self) -> None:
        """The graph, where rows go through shared memory: a seat that let a deadline pass gets none for a while."""
        (self._layers if self.link.graph_key() is None else self._graph.replay)()

    def _stop_amid(self, body: Callable[[], None]) -> None:
        self.link.begin_step(0, [self._case.world.rows])
        timer = threading.Timer(random.random() * 0.003, self.link._control.abort)
        timer.start()
        body()
        timer.join()
        self.link.finish_step()

    def _confirmed(self, body: Callable[[], None]) -> int:
        for tries in range(1, 20):
            self.link.begin_step(tries, [self._case.world.rows])
            body()
            if self.link.finish_step():
                return tries
        raise AssertionError("a step was never confirmed")

    def _layers(self) -> None:
        """Rows differ by step and layer, and so does what experts make of them: an old answer is a wrong one."""
        self._wrong.zero_()
        self._steps += 1
        x_TD, ids_TK, weights_TK = self._calls
        for layer in range(LAYERS):
            if self._gpu and layer in (0, LAYERS - 1):
                stamp[(1,)](self._stamps, 0 if layer == 0 else 1)
            if self._gpu and self._case.pause_us:
                torch.cuda._sleep(self._case.pause_us * CYCLES_PER_US)
            rows_TD = x_TD + (self._steps % 61 + layer) if self._case.check else x_TD
            answer_TD: Tensor = self.link.combine(self.link.dispatch(layer, rows_TD, ids_TK, weights_TK))
            if self._case.check:
                self._wrong += (answer_TD != rows_TD * factor_of(layer)).sum()


def measure(case: Case, device: torch.device, memory: str) -> dict[str, Any]:
    """Figures of each client; ``wrong``: elements of answers, ``again``: steps that had to run again."""
    with patch.object(symm_tempo, "MIN_GAIN", -9.0 if case.way == "together" else symm_tempo.MIN_GAIN):
        return _measured(case, device, memory)


def _measured(case: Case, device: torch.device, memory: str) -> dict[str, Any]:
    limits = Limits(join_rows=0 if case.way == "alone" else JOIN_ROWS)
    server = serve_seat(case.world, device, 0, 0, memory, limits, by_layer if case.check else None)
    (host,) = server._extensions
    assert isinstance(host, SharedMemoryServer)
    began = time.perf_counter()
    clients = [Client(number, case, device, server, memory) for number in range(case.clients)]
    for client in clients:  # all: only what ``prepare`` captures may be captured
        assert client.link.peers.wait_for(bool, 120.0), "no memory is shared"
    while case.way != "alone" and any(one.missing() for one in host._join_queue._groups.values()):
        time.sleep(0.01)
    for client in clients:
        client.prepare()
    ready_s = time.perf_counter() - began
    begin = threading.Barrier(len(clients))
    threads = [threading.Thread(target=client.run, args=(begin,), daemon=True) for client in clients]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    together = host.joined_steps() / (STEPS * case.clients)
    for client in clients:
        client.link.close()
    server.close()
    found = [client.found for client in clients]
    return {
        "clients": case.clients, "rows": case.world.rows, "pause_us": case.pause_us, "way": case.way,
        "ready_s": ready_s, "together": together,
        **{key: [round(one[key], 2) for one in found if one] for key in found[0]},
    }  # fmt: skip


def cases(totals: list[int]) -> list[Case]:
    found = []
    exact = World(hidden=512, experts=16, slots=4, layers=LAYERS, rows=24, micro_batches=1)
    for clients in (2, 3, 8):
        found += [
            Case(world=exact, clients=clients, pause_us=20, way="together", check=True, stops=stops)
            for stops in (False, True)
        ]
    for clients in (2, 4):
        world = World(experts=128 // clients, slots=8 // clients, layers=LAYERS, micro_batches=1, compute="shard")
        for total in totals:
            sized = replace(world, rows=total // clients)
            found += [
                Case(world=sized, clients=clients, pause_us=pause_us, way=way)
                for pause_us in (40, 80)
                for way in ("alone", "auto", "together")
            ]
    return found


def main() -> None:
    parent = Parent()
    log_to_stderr()
    device = device_of(parent.facts["gpu"])
    for case in cases(parent.facts["totals"]):
        parent.report(**measure(case, device, "vmm"))
    parent.report(end=True)


if __name__ == "__main__":
    main()
