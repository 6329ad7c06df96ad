"""An expert worker's part of a whole step, ready to be started by one message: for every layer and micro-batch wait for
rows, compute, put the answers.

On a GPU it is a captured graph, on a stream of its own; on a CPU a thread runs it. Steps of one attention worker run in
the order in which they were started; those of several know nothing of each other (ExpertFlow, section 3.2).
Legend: R rows of a bucket, D hidden size, K slots, E experts.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Protocol

import torch
from torch import Tensor

from moe_kernels.exchange import send_answers, take_rows
from moe_kernels.exchange_layout import ABORTED, BASE, DEADLINE, FAILED, LAST, PEER, Layout
from services.fabric.symm_control import ControlBlock
from services.fabric.symm_time import GraphWatch, HostWatch, Watch
from services.fabric.symm_wire import Step, buckets
from services.fabric.tcp_compute import Compute

log = logging.getLogger(__name__)


class StepBody:
    """The calls of a step, on buffers that do not move.

    Args:
        layers: in the order of the model; ``counts_LE`` has a row for each.
        inbox: see :func:`moe_kernels.exchange.take_rows`.
    """

    def __init__(
        self, compute: Compute, layers: Sequence[int], inbox: Tensor, counts_LE: Tensor, layout: Layout
    ) -> None:
        self._compute, self._layers, self._inbox = compute, list(layers), inbox
        self._counts_LE, self._layout = counts_LE, layout
        self.control = ControlBlock(inbox.device)
        self.watch: Watch | None = None
        """Times the work of the exchanges that run, or are captured, now."""
        self._taken_RK = torch.full((layout.rows, layout.slots), -1, dtype=torch.int32, device=inbox.device)

    @property
    def shapes(self) -> Iterator[tuple[int, int]]:
        """Bucket and number of micro-batches of every step that may come."""
        return product(buckets(self._layout.rows), range(1, self._layout.micro_batches + 1))

    @property
    def layers(self) -> int:
        return len(self._layers)

    def run(self, bucket: int, micro_batches: int) -> None:
        with torch.inference_mode():
            for exchange in range(self.layers * micro_batches):
                self._exchange(bucket, exchange, *divmod(exchange, micro_batches))

    def _exchange(self, bucket: int, exchange: int, at: int, micro_batch: int) -> None:
        layout, words = self._layout, self.control.words
        taken_RK, counts_E = self._taken_RK[:bucket], self._counts_LE[at]
        x_RD, weights_RK = take_rows(
            self._inbox,
            taken_RK,
            counts_E,
            words,
            layout=layout,
            bucket=bucket,
            exchange=exchange,
            micro_batch=micro_batch,
        )
        with self.watch.around(exchange) if self.watch else nullcontext():
            self._answer(bucket, exchange, at, micro_batch, x_RD, weights_RK)

    def _answer(self, bucket: int, exchange: int, at: int, micro_batch: int, x_RD: Tensor, weights_RK: Tensor) -> None:
        layout, taken_RK, counts_E = self._layout, self._taken_RK[:bucket], self._counts_LE[at]
        if layout.unsummed:
            ones_P1 = torch.ones(taken_RK.numel(), 1, device=x_RD.device)
            x_PD = x_RD.unsqueeze(1).expand(-1, layout.slots, -1).reshape(-1, layout.hidden)
            ids_P1 = taken_RK.view(-1, 1)
            y = self._compute(self._layers[at], x_PD, ids_P1, ones_P1)
        else:
            y = self._compute(self._layers[at], x_RD, taken_RK, weights_RK)
        send_answers(
            y,
            taken_RK,
            counts_E,
            self.control.words,
            layout=layout,
            bucket=bucket,
            exchange=exchange,
            micro_batch=micro_batch,
        )

    def words_of(self, step: Step, answers: int, wait_s: float) -> dict[int, int]:
        return {
            BASE: step.base,
            DEADLINE: int(wait_s * 1e9),
            LAST: step.base + self.layers * step.micro_batches,
            PEER: answers,
        }


class Steps(Protocol):
    """A :class:`StepBody` prepared to be started."""

    @property
    def seconds(self) -> float:
        """That its exchanges took since the start, without waits for rows; of a graph's last step when the next one
        starts."""
        ...

    def start(self, step: Step, words: dict[int, int]) -> None:
        """Queue a step; returns at once. One that was started before and has not ended is given up: an attention worker
        starts the next when it has all answers, has lost another seat that it counted on, or waits no longer."""
        ...

    def give_up(self) -> None:
        """End what waits, in the thread that starts steps. The process computes rows that come over tcp meanwhile, and
        CUDA may want a GPU without running kernels for it: to load one, to pin memory."""
        ...

    def idle(self) -> bool: ...

    def wait(self) -> None:
        """Until all that was started has ended, which it does: every wait has its deadline."""
        ...

    def close(self) -> None:
        """End what waits, in the thread that started it."""
        ...


class GraphSteps:
    """A graph for each shape of a step, captured here."""

    def __init__(self, body: StepBody) -> None:
        self._body = body
        self._device = body.control.words.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._watches: dict[tuple[int, int], GraphWatch] = {}
        self._running: GraphWatch | None = None
        self._seconds = 0.0
        torch.cuda.current_stream(self._device).synchronize()  # this thread made the body's buffers on that one
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for bucket, micro_batches in body.shapes:
                if micro_batches == 1:  # nothing waits, nothing is sent: only kernels are compiled and loaded
                    body.control.write({FAILED: ABORTED})
                    body.run(bucket, micro_batches)
                    self._stream.synchronize()
                self._graphs[bucket, micro_batches] = graph = self._captured((bucket, micro_batches))
                # The first launch uploads the graph, which kernels that wait on this GPU, such as those of an attention
                # worker beside this seat, would hold up until they give up.
                body.control.write({FAILED: ABORTED})
                graph.replay()
            self._stream.synchronize()

    @property
    def seconds(self) -> float:
        return self._seconds

    def start(self, step: Step, words: dict[int, int]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._supersede()
            self._seconds += self._running.read() if self._running else 0.0
            self._body.control.write(words)
            self._graphs[step.bucket, step.micro_batches].replay()
            self._running = self._watches[step.bucket, step.micro_batches]

    def give_up(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._supersede()

    def idle(self) -> bool:
        return self._stream.query()

    def wait(self) -> None:
        self._stream.synchronize()

    def close(self) -> None:
        self.give_up()
        self.wait()
        self._graphs.clear()

    def _supersede(self) -> None:
        if not self.idle():
            self._body.control.supersede()

    def _captured(self, shape: tuple[int, int]) -> torch.cuda.CUDAGraph:
        """Without the pauses of ``torch.cuda.graph``: the steps of other attention workers go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        self._watches[shape] = self._body.watch = GraphWatch(self._body.layers * shape[1])
        graph.capture_begin(pool=pool, capture_error_mode="thread_local")
        try:
            self._body.run(*shape)
        finally:
            graph.capture_end()
            self._body.watch = None
        return graph


class ThreadSteps:
    """A thread that runs steps one after the other."""

    def __init__(self, body: StepBody) -> None:
        self._body = body
        body.watch = self._watch = HostWatch()
        self._waiting: queue.SimpleQueue[tuple[int, Step, dict[int, int]] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._under_way, self._newest = 0, 0
        self._thread = threading.Thread(target=self._run, name="symm steps", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        return self._watch.seconds

    def start(self, step: Step, words: dict[int, int]) -> None:
        with self._changed:
            self._under_way += 1
            self._newest += 1
        self._body.control.supersede()
        self._waiting.put((self._newest, step, words))

    def give_up(self) -> None:
        self._newest += 1
        self._body.control.supersede()

    def idle(self) -> bool:
        return self._under_way == 0

    def wait(self) -> None:
        with self._changed:
            self._changed.wait_for(self.idle)

    def close(self) -> None:
        self.give_up()
        self._waiting.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            number, step, words = item
            try:
                self._body.control.write(words)
                if number == self._newest:  # if it is not by now, what sets it ends the waits of this one
                    self._body.run(step.bucket, step.micro_batches)
            except Exception:  # the thread's boundary: the attention worker's deadline passes, other steps go on
                log.exception("Step %d of epoch %d failed.", step.step, step.epoch)
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()
