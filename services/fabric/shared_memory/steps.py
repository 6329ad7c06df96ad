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
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_kernels.exchange.layout import ABORTED, BASE, DEADLINE, FAILED, LAST, PEER, Layout
from moe_kernels.exchange.op import send_answers, take_rows
from services.fabric.shared_memory.busy_time import GraphWatch, HostWatch, Watch
from services.fabric.shared_memory.control_block import ControlBlock
from services.fabric.shared_memory.messages import Step, buckets
from services.fabric.tcp.compute import Compute
from services.runtime.collecting import no_collection

log = logging.getLogger(__name__)


class Shape(NamedTuple):
    """Of a step. ``members``: for how many clients' rows its calls have room."""

    bucket: int
    micro_batches: int = 1
    members: int = 1


class Body(Protocol):
    """The calls of a step, on buffers that do not move."""

    control: ControlBlock
    watch: Watch | None
    """Times the work of the exchanges that run, or are captured, now."""

    @property
    def shapes(self) -> Iterator[Shape]:
        """Of every step that may come."""
        ...

    @property
    def layers(self) -> int: ...

    def run(self, shape: Shape) -> None: ...


class StepBody:
    """A :class:`Body` for the rows of one client.

    Args:
        layers: in the order of the model; ``counts_LE`` has a row for each.
        inbox: see :func:`moe_kernels.exchange.op.take_rows`.
    """

    def __init__(
        self, compute: Compute, layers: Sequence[int], inbox: Tensor, counts_LE: Tensor, layout: Layout
    ) -> None:
        self._compute, self._layers, self._inbox = compute, list(layers), inbox
        self._counts_LE, self._layout = counts_LE, layout
        self.control = ControlBlock(inbox.device)
        self.watch: Watch | None = None
        self._taken_RK = torch.full((layout.rows, layout.slots), -1, dtype=torch.int32, device=inbox.device)

    @property
    def shapes(self) -> Iterator[Shape]:
        sizes = product(buckets(self._layout.rows), range(1, self._layout.micro_batches + 1))
        return (Shape(*size) for size in sizes)

    @property
    def layers(self) -> int:
        return len(self._layers)

    def run(self, shape: Shape) -> None:
        bucket, micro_batches, _ = shape
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
        taken_RK, counts_E = self._taken_RK[:bucket], self._counts_LE[at]
        send_answers(
            computed(self._compute, self._layers[at], self._layout, x_RD, taken_RK, weights_RK),
            taken_RK,
            counts_E,
            self.control.words,
            layout=self._layout,
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


def computed(compute: Compute, layer: int, layout: Layout, x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """``y_RD``, or one answer for each pair, ``y_PD``, where the layout wants them unsummed."""
    if not layout.unsummed:
        return compute(layer, x_RD, ids_RK, weights_RK)
    ones_P1 = torch.ones(ids_RK.numel(), 1, device=x_RD.device)
    x_PD = x_RD.unsqueeze(1).expand(-1, layout.slots, -1).reshape(-1, layout.hidden)
    return compute(layer, x_PD, ids_RK.view(-1, 1), ones_P1)


class Steps(Protocol):
    """A :class:`Body` prepared to be started."""

    @property
    def seconds(self) -> float:
        """That its exchanges took since the start, without waits for rows; of a graph's last step when the next one
        starts."""
        ...

    def start(self, shape: Shape, words: dict[int, int]) -> None:
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

    def __init__(self, body: Body) -> None:
        self._body = body
        self._device = body.control.words.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._watches: dict[Shape, GraphWatch] = {}
        self._running: GraphWatch | None = None
        self._seconds = 0.0
        torch.cuda.current_stream(self._device).synchronize()  # this thread made the body's buffers on that one
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for shape in body.shapes:
                if shape.micro_batches == 1:  # nothing waits, nothing is sent: only kernels are compiled and loaded
                    body.control.write({FAILED: ABORTED})
                    body.run(shape)
                    self._stream.synchronize()
                self._graphs[shape] = graph = self._captured(shape)
                # The first launch uploads the graph, which kernels that wait on this GPU, such as those of an attention
                # worker beside this seat, would hold up until they give up.
                body.control.write({FAILED: ABORTED})
                graph.replay()
            self._stream.synchronize()

    @property
    def seconds(self) -> float:
        return self._seconds

    def start(self, shape: Shape, words: dict[int, int]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._supersede()
            self._seconds += self._running.read() if self._running else 0.0
            self._body.control.write(words)
            self._graphs[shape].replay()
            self._running = self._watches[shape]

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

    def _captured(self, shape: Shape) -> torch.cuda.CUDAGraph:
        """Without the pauses of ``torch.cuda.graph``: the steps of other attention workers go on meanwhile."""
        graph = torch.cuda.CUDAGraph()
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        self._watches[shape] = self._body.watch = GraphWatch(self._body.layers * shape.micro_batches)
        with no_collection():
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                self._body.run(shape)
            finally:
                graph.capture_end()
                self._body.watch = None
        return graph


class ThreadSteps:
    """A thread that runs steps one after the other."""

    def __init__(self, body: Body) -> None:
        self._body = body
        body.watch = self._watch = HostWatch()
        self._waiting: queue.SimpleQueue[tuple[int, Shape, dict[int, int]] | None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._under_way, self._newest = 0, 0
        self._thread = threading.Thread(target=self._run, name="shared memory steps", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        return self._watch.seconds

    def start(self, shape: Shape, words: dict[int, int]) -> None:
        with self._changed:
            idle = self._under_way == 0
            self._under_way += 1
            self._newest += 1
        if idle:  # nobody reads the words of an older step
            self._body.control.write(words)
            words = {}
        else:
            self._body.control.supersede()
        self._waiting.put((self._newest, shape, words))

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
            number, shape, words = item
            try:
                if words:
                    self._body.control.write(words)
                if number == self._newest:  # if it is not by now, what sets it ends the waits of this one
                    self._body.run(shape)
            except Exception:  # the thread's boundary: the attention worker's deadline passes, other steps go on
                log.exception("A step of %d rows failed.", shape.bucket)
            finally:
                with self._changed:
                    self._under_way -= 1
                    self._changed.notify_all()


def prepared(body: Body) -> Steps:
    """On a GPU its graphs are captured, which takes a while."""
    return GraphSteps(body) if body.control.words.is_cuda else ThreadSteps(body)
