"""Expert workers of tests on GPUs, in processes of their own: many servers in one, or one that is killed."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from services.fabric.nccl.lanes import Lanes
from services.fabric.nccl.process_groups import NcclGroups
from services.fabric.shared_memory.cuda_memory import CudaMemory
from services.fabric.shared_memory.server import SharedMemoryServer
from services.fabric.tcp.compute import Compute
from services.fabric.tcp.server import ExpertServer
from services.model.experts import ExpertShard
from testkit.fabric.tcp import scaled, serve
from testkit.gpu.packing import unpacked
from testkit.gpu.ranks import Member

START_S, ANSWER_S = 90.0, 90.0


def why_not(gpus: int) -> str | None:
    """What keeps tests that need so many GPUs from running here."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        return "kernels are interpreted here: make gpu-test and make gpu1-test run them"
    found = torch.cuda.device_count()
    return None if found >= gpus else f"needs {gpus} GPUs, found {found}"


class GpuWorker:
    """A process with a GPU; what it is asked for, the class below does there."""

    def __init__(self, gpu: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_run, args=(gpu, theirs), daemon=True)
        self._process.start()
        theirs.close()
        self._up = False

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    def ask(self, what: str, **arguments: Any) -> Any:
        if not self._up:
            assert self._pipe.poll(START_S), "the worker did not start"
            self._up = self._pipe.recv()
        self._pipe.send((what, arguments))
        assert self._pipe.poll(ANSWER_S), f"no answer to {what}"
        good, answer = self._pipe.recv()
        assert good, answer
        return answer

    def kill(self) -> None:
        self._process.kill()
        self._process.join()


class GpuServer:
    """One seat's server in a worker; what is asked of an :class:`ExpertServer` in a test."""

    def __init__(
        self, worker: GpuWorker, number: int, done: Callable[[GpuWorker], None] = lambda _worker: None, **facts: Any
    ) -> None:
        self._worker, self._number, self._done = worker, number, done
        host, port = worker.ask("serve", number=number, **facts)
        self.address = str(host), int(port)

    def drain(self, seconds: float) -> bool:
        gone = bool(self._worker.ask("drain", number=self._number, seconds=seconds))
        self._done(self._worker)
        return gone

    def close(self) -> None:
        self._worker.ask("close", number=self._number)
        self._done(self._worker)

    def kill(self) -> None:
        """-9, with all else that its process serves."""
        self._worker.kill()


class GpuPool:
    """Workers on all GPUs but the first, which is the caller's own."""

    def __init__(self, gpus: int) -> None:
        self.gpus = gpus
        self._hosts: dict[int, GpuWorker] = {}
        self._idle: dict[int, list[GpuWorker]] = {}
        self._started: list[GpuWorker] = []
        self._numbers = itertools.count()

    def next_number(self) -> int:
        """Of a seat: none is used twice."""
        return next(self._numbers)

    def host(self, place: int) -> GpuWorker:
        """One for each GPU, that lives as long as the pool."""
        gpu = self._gpu(place)
        if gpu not in self._hosts:
            self._hosts[gpu] = self._start(gpu)
        return self._hosts[gpu]

    def prepare(self, place: int, count: int) -> None:
        """So many more that :meth:`take` can give at once."""
        gpu = self._gpu(place)
        self._idle.setdefault(gpu, []).extend(self._start(gpu) for _ in range(count))

    def take(self, place: int) -> GpuWorker:
        """One of the caller's own, to kill or to give back; another is started in its place."""
        gpu = self._gpu(place)
        idle = self._idle.setdefault(gpu, [])
        if not idle:
            idle.append(self._start(gpu))
        return idle.pop(0)

    def give_back(self, worker: GpuWorker, place: int) -> None:
        self._idle[self._gpu(place)].append(worker)

    def close(self) -> None:
        for worker in self._started:
            worker.kill()

    def _gpu(self, place: int) -> int:
        return 1 + place % (self.gpus - 1)

    def _start(self, gpu: int) -> GpuWorker:
        self._started.append(GpuWorker(gpu))
        return self._started[-1]


class _Child:
    """In the process."""

    def __init__(self, gpu: int) -> None:
        self._device = torch.device("cuda", gpu)
        torch.cuda.set_device(self._device)
        self._lanes = Lanes(NcclGroups(self._device))
        self._servers: dict[int, ExpertServer] = {}
        self.member: Member | None = None

    def join(self, **facts: Any) -> None:
        """Become a rank; what else a :class:`Member` does may be asked for then."""
        self.member = Member(device=self._device, **facts)

    def serve(
        self,
        number: int,
        experts: Mapping[int, Sequence[int]],
        *,
        weights: bytes | None,
        hidden: int,
        dtype: str,
        shared: bool,
        num_experts: int,
    ) -> tuple[str, int]:
        """``weights``: None for :func:`testkit.fabric.tcp.scaled`. With a lane, and ``shared`` memory too."""
        compute: Compute = scaled
        if weights is not None:
            compute = ExpertShard(unpacked(weights, self._device), num_experts=num_experts).forward
        memory = None
        if shared:
            memory = SharedMemoryServer(
                compute, memory=CudaMemory(self._device), device=self._device, layers=list(experts),
                num_experts=num_experts, hidden=hidden, dtype=getattr(torch, dtype),
            )  # fmt: skip
        server = serve(
            lambda layer, *rows: compute(layer, *(part.to(self._device) for part in rows)),
            seat=number,
            experts=experts,
            hidden=hidden,
            dtype=dtype,
            memory=memory,
            lanes=self._lanes,
        )
        self._servers[number] = server
        return server.address

    def drain(self, number: int, seconds: float) -> bool:
        return self._servers.pop(number).drain(seconds)

    def close(self, number: int) -> None:
        self._servers.pop(number).close()


def _run(gpu: int, theirs: Connection) -> None:
    child = _Child(gpu)
    theirs.send(True)
    while True:
        try:
            what, arguments = theirs.recv()
        except EOFError:
            os._exit(0)
        try:
            does = getattr(child, what, None) or getattr(child.member, what)
            theirs.send((True, does(**arguments)))
        except Exception:  # noqa: BLE001  the other end raises it
            theirs.send((False, traceback.format_exc()))
