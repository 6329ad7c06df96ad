"""Expert servers in processes of their own, for measurements: real sockets and frames, experts that take their time."""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Protocol

import torch
from testkit.fabric.slow import Compute, slow
from testkit.fabric.tcp import hello, serve

from services.model.experts import ExpertShard
from services.model.load_spec import load_spec
from services.model.progress import NoProgress
from services.model.weights import load_experts
from services.routing import Seat

START_S = 60.0


class Experts(Protocol):
    """Made in the parent, at work in the child."""

    def compute(self) -> Compute: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Asleep:
    """Returns the rows as they came, after ``call_s`` and ``row_s`` for each of them: needs no core."""

    row_s: float
    call_s: float = 0.0

    def compute(self) -> Compute:
        def echo(_layer: int, x_TD: torch.Tensor, _ids: torch.Tensor, _weights: torch.Tensor) -> torch.Tensor:
            return x_TD.clone()

        return slow(echo, row_s=self.row_s, call_s=self.call_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class OfModel:
    """All experts of a checkpoint, in float32, each row taking ``row_s`` at least."""

    folder: Path
    row_s: float = 0.0

    def compute(self) -> Compute:
        spec, cpu = load_spec(self.folder), torch.device("cpu")
        weights = load_experts(self.folder, spec, dtype=torch.float32, device=cpu, progress=NoProgress())
        return slow(ExpertShard(weights, num_experts=spec.num_experts).forward, row_s=self.row_s)


@dataclass(frozen=True, kw_only=True, slots=True)
class Work:
    """What a server had done when it was asked. ``seconds`` of computing."""

    seconds: float
    rows: int
    calls: int
    computations: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ExpertProcess:
    """A running server; ``seat`` is how a table lists it."""

    seat: Seat
    ask: Connection

    def work(self) -> Work:
        self.ask.send("work")
        return self.ask.recv()  # type: ignore[no-any-return]


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """A server to start: what its experts are, which of them it holds, and the model's width."""

    group: int
    experts: Mapping[int, Sequence[int]]
    made_of: Experts
    hidden: int


@contextmanager
def expert_processes(holdings: Sequence[Holding]) -> Iterator[list[ExpertProcess]]:
    """One process for each; they end with the block."""
    context = multiprocessing.get_context("spawn")
    children, running = [], []
    try:
        for number, holding in enumerate(holdings):
            ours, theirs = context.Pipe()
            children.append(context.Process(target=_run, args=(number, holding, theirs), daemon=True))
            children[-1].start()
            running.append((number, holding, ours))
        yield [_started(*one) for one in running]
    finally:
        for _, _, ours in running:
            ours.close()  # the child reads the end of it
        for child in children:
            child.join(5)
            if child.is_alive():
                child.kill()


def _started(number: int, holding: Holding, ours: Connection) -> ExpertProcess:
    assert ours.poll(START_S), "the expert process did not start"
    host, port = ours.recv()
    seat = Seat(number=number, worker=f"experts-{number}", group=holding.group, host=host, port=port)
    return ExpertProcess(seat=seat, ask=ours)


def _run(number: int, holding: Holding, theirs: Connection) -> None:
    torch.set_num_threads(1)
    server = serve(
        holding.made_of.compute(),
        seat=number,
        experts=holding.experts,
        hidden=holding.hidden,
        hello=hello(holding.hidden, seat=number),
    )
    theirs.send(server.address)
    try:
        while theirs.recv():
            counts = server.counts
            rows = sum(counts.layer_rows.values())
            work = Work(seconds=counts.seconds, rows=rows, calls=counts.calls, computations=counts.computations)
            theirs.send(work)
    except EOFError:
        server.close()
