"""Attention sources over real links and expert servers, free or with a barrier before each layer (ExpertFlow 3.2).

The barrier is a construct of this file: sources wait for one another before they dispatch a layer, so that the experts
begin it when all batches are there and nobody goes on before the slowest was answered, as in figure 3.2.
Legend: T rows of a source, K experts per row.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from testkit.fabric.tcp import linked, table_of

from perf.kit.expert_processes import Asleep, ExpertProcess, Holding, Work, expert_processes
from services.fabric.tcp.link import TcpLink
from services.routing import even_groups

HIDDEN, EXPERTS, SLOTS = 64, 16, 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """An attention worker: rows of its batch, and seconds of attention per row and layer. ``skew`` of its routing: the
    expert on place i is chosen in proportion to ``(i + 1) ** -skew``."""

    rows: int
    row_s: float
    skew: float = 0.7


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """``idle`` share of each expert worker's time; ``rows_per_s`` by source, each row counted once a layer."""

    idle: tuple[float, ...]
    rows_per_s: tuple[float, ...]

    @property
    def mean_idle(self) -> float:
        return sum(self.idle) / len(self.idle)


class Crowd:
    """Sources in threads, each over a link of its own; they spend their time asleep or waiting."""

    def __init__(self, sources: Sequence[Source], links: Sequence[TcpLink], *, barrier: bool) -> None:
        self._barrier = threading.Barrier(len(sources)) if barrier else None
        self._stop = threading.Event()
        self.rows = [0] * len(sources)
        self._failures: list[BaseException] = []
        self._threads = [
            threading.Thread(target=self._run, args=(number, source, links[number]), daemon=True)
            for number, source in enumerate(sources)
        ]

    def __enter__(self) -> Crowd:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        if self._barrier is not None:
            self._barrier.abort()
        for thread in self._threads:
            thread.join(30)
        if self._failures:
            raise self._failures[0]

    def _run(self, number: int, source: Source, link: TcpLink) -> None:
        generator = torch.Generator().manual_seed(number)
        chances_E = torch.arange(1, EXPERTS + 1).double() ** -source.skew
        x_TD, weights_TK = torch.ones(source.rows, HIDDEN), torch.ones(source.rows, SLOTS)
        try:
            while not self._stop.is_set():
                ids_TK = torch.multinomial(chances_E.expand(source.rows, -1), SLOTS, generator=generator)
                time.sleep(source.rows * source.row_s)
                if self._barrier is not None:
                    self._barrier.wait()
                link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
                self.rows[number] += source.rows
        except threading.BrokenBarrierError:
            pass
        except BaseException as error:  # noqa: BLE001  raised again where the crowd ends
            self._failures.append(error)


@contextmanager
def stage(workers: int, sources: int, *, row_s: float) -> Iterator[tuple[list[ExpertProcess], list[TcpLink]]]:
    """``workers`` expert processes with equal shares of the experts, and a link for each source."""
    groups = even_groups([0], EXPERTS, workers)
    holdings = [
        Holding(group=group.number, experts=group.experts, made_of=Asleep(row_s=row_s), hidden=HIDDEN)
        for group in groups
    ]
    with expert_processes(holdings) as experts:
        table = table_of(*(expert.seat for expert in experts), groups=groups, experts=EXPERTS)
        contexts = [linked(table, hidden=HIDDEN, call_s=60.0) for _ in range(sources)]
        links = [context.__enter__() for context in contexts]
        try:
            yield experts, links
        finally:
            for context in contexts:
                context.__exit__(None, None, None)


def measure(
    experts: Sequence[ExpertProcess],
    links: Sequence[TcpLink],
    sources: Sequence[Source],
    *,
    barrier: bool,
    seconds: float,
) -> Outcome:
    """What workers and sources did in ``seconds`` in the middle of a run."""
    with Crowd(sources, links, barrier=barrier) as crowd:
        time.sleep(seconds / 5)
        began, before, rows = time.perf_counter(), [expert.work() for expert in experts], list(crowd.rows)
        time.sleep(seconds)
        took = time.perf_counter() - began
        after = [expert.work() for expert in experts]
        done = [now - then for now, then in zip(crowd.rows, rows, strict=True)]
    return Outcome(
        idle=tuple(_idle(then, now, took) for then, now in zip(before, after, strict=True)),
        rows_per_s=tuple(count / took for count in done),
    )


def _idle(before: Work, after: Work, seconds: float) -> float:
    return 1 - (after.seconds - before.seconds) / seconds
