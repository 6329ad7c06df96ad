"""An expert worker's part of a whole step, which one message starts: for every layer and micro-batch it waits for rows,
computes and sends the answers.

On a GPU the part is a captured CUDA graph on a stream of its own; on a CPU a thread runs it. Steps of one attention
worker run in the order of their start; steps of several workers are independent (ExpertFlow, section 3.2).
Legend: R rows of a bucket, P pairs of a row and a slot, D hidden size, K slots, E experts, L layers.
"""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from itertools import product
from typing import Any, NamedTuple, Protocol

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
    """The size of a step: rows of a micro-batch, micro-batches, and clients whose rows its calls have room for."""

    bucket: int
    micro_batches: int = 1
    members: int = 1


class Body(Protocol):
    """The calls of a step, on buffers that do not move."""

    control: ControlBlock
    watch: Watch | None
    """Times the exchanges that run, or are captured, at this moment."""
    layers: int
    """Number of layers with experts."""

    @property
    def shapes(self) -> Iterator[Shape]:
        """The shapes of all steps that may be started."""
        ...

    def run(self, shape: Shape) -> None:
        """Run all exchanges of a step: wait for rows, compute and send answers as ``control`` says."""
        ...


class StepBody:
    """A :class:`Body` for the rows of one client.

    Args:
        layers: numbers of the layers with experts, in the order of the model.
        inbox: the client's rows, uint8, see :func:`moe_kernels.exchange.op.take_rows`.
        counts_LE: int64, pairs by layer and expert, to which every exchange adds.
    """

    def __init__(
        self, compute: Compute, layers: Sequence[int], inbox: Tensor, counts_LE: Tensor, layout: Layout
    ) -> None:
        self._compute, self._layers, self._inbox = compute, list(layers), inbox
        self._counts_LE, self._layout = counts_LE, layout
        self.layers = len(layers)
        self.control = ControlBlock(inbox.device)
        self.watch: Watch | None = None
        self._taken_RK = torch.full((layout.rows, layout.slots), -1, dtype=torch.int32, device=inbox.device)

    @property
    def shapes(self) -> Iterator[Shape]:
        sizes = product(buckets(self._layout.rows), range(1, self._layout.micro_batches + 1))
        return (Shape(*size) for size in sizes)

    def run(self, shape: Shape) -> None:
        bucket, micro_batches, _ = shape
        with torch.inference_mode():
            for exchange in range(self.layers * micro_batches):
                self._exchange(bucket, exchange, *divmod(exchange, micro_batches))

    def _exchange(self, bucket: int, exchange: int, at: int, micro_batch: int) -> None:
        taken_RK, counts_E, words = self._taken_RK[:bucket], self._counts_LE[at], self.control.words
        call: dict[str, Any] = {
            "layout": self._layout, "bucket": bucket, "exchange": exchange, "micro_batch": micro_batch
        }  # fmt: skip
        x_RD, weights_RK = take_rows(self._inbox, taken_RK, counts_E, words, **call)
        with self.watch.around(exchange) if self.watch else nullcontext():
            answers = computed(self._compute, self._layers[at], self._layout, x_RD, taken_RK, weights_RK)
            send_answers(answers, taken_RK, counts_E, words, **call)

    def words_of(self, step: Step, answers: int, wait_s: float) -> dict[int, int]:
        """Return the control words that start ``step``, with the address of the client's ``answers``."""
        return {
            BASE: step.base,
            DEADLINE: int(wait_s * 1e9),
            LAST: step.base + self.layers * step.micro_batches,
            PEER: answers,
        }


def computed(compute: Compute, layer: int, layout: Layout, x_RD: Tensor, ids_RK: Tensor, weights_RK: Tensor) -> Tensor:
    """Return ``y_RD`` in the dtype of ``x_RD``, or ``y_PD``, one answer per pair, where the layout says unsummed."""
    if not layout.unsummed:
        return compute(layer, x_RD, ids_RK, weights_RK)
    ones_P1 = torch.ones(ids_RK.numel(), 1, device=x_RD.device)
    x_PD = x_RD.unsqueeze(1).expand(-1, layout.slots, -1).reshape(-1, layout.hidden)
    return compute(layer, x_PD, ids_RK.view(-1, 1), ones_P1)


class Steps(Protocol):
    """A :class:`Body` whose steps can be started. One thread calls :meth:`start`, :meth:`give_up` and :meth:`close`."""

    @property
    def seconds(self) -> float:
        """Seconds of all exchanges since the start, without waits for rows; a graph's last step counts later."""
        ...

    def start(self, shape: Shape, words: dict[int, int]) -> None:
        """Queue a step with these control words; return at once.

        A step that has not ended is given up: an attention worker starts the next step when it has all answers, has
        lost another seat of the step, or has stopped waiting.
        """
        ...

    def give_up(self) -> None:
        """End the waits of the running step: rows over tcp, or CUDA (to load a kernel, to pin memory), need the GPU."""
        ...

    def idle(self) -> bool:
        """Return whether every step that was started has ended."""
        ...

    def close(self) -> None:
        """Give up the running step and free what steps need."""
        ...


class GraphSteps:
    """Runs steps as CUDA graphs, one for each shape, which the constructor captures."""

    def __init__(self, body: Body) -> None:
        self._body = body
        self.seconds = 0.0
        self._device = body.control.words.device
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        self._graphs: dict[Shape, torch.cuda.CUDAGraph] = {}
        self._watches: dict[Shape, GraphWatch] = {}
        self._running: GraphWatch | None = None
        torch.cuda.current_stream(self._device).synchronize()  # it fills the body's buffers
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            for shape in body.shapes:
                if shape.micro_batches == 1:  # nothing waits, nothing is sent: only kernels are compiled and loaded
                    body.control.write({FAILED: ABORTED})
                    body.run(shape)
                    self._stream.synchronize()
                self._graphs[shape] = graph = self._captured(shape)
                # The first launch uploads the graph. Kernels that wait on this GPU, such as those of a colocated
                # attention worker, would delay the upload until their deadline.
                body.control.write({FAILED: ABORTED})
                graph.replay()
            self._stream.synchronize()

    def start(self, shape: Shape, words: dict[int, int]) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._supersede()
            self.seconds += self._running.read() if self._running else 0.0
            self._body.control.write(words)
            self._graphs[shape].replay()
            self._running = self._watches[shape]

    def give_up(self) -> None:
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            self._supersede()

    def idle(self) -> bool:
        return self._stream.query()

    def close(self) -> None:
        self.give_up()
        self._stream.synchronize()
        self._graphs.clear()

    def _supersede(self) -> None:
        if not self.idle():
            self._body.control.supersede()

    def _captured(self, shape: Shape) -> torch.cuda.CUDAGraph:
        """Capture a step without the pauses of ``torch.cuda.graph``: other attention workers' steps run meanwhile."""
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
    """Runs steps one after the other in a thread."""

    def __init__(self, body: Body) -> None:
        self._body = body
        body.watch = self._watch = HostWatch()
        self._waiting: queue.SimpleQueue[tuple[int, Shape, dict[int, int]] | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._under_way, self._newest = 0, 0
        self._thread = threading.Thread(target=self._run, name="shared memory steps", daemon=True)
        self._thread.start()

    @property
    def seconds(self) -> float:
        return self._watch.seconds

    def start(self, shape: Shape, words: dict[int, int]) -> None:
        with self._lock:
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
                if number == self._newest:  # whoever raises it later ends the waits of this step
                    self._body.run(shape)
            except Exception:  # the thread's boundary: the attention worker's deadline passes, other steps go on
                log.exception("a step of %d rows failed", shape.bucket)
            finally:
                with self._lock:
                    self._under_way -= 1


def prepared(body: Body) -> Steps:
    """Return ``body``'s steps; on a GPU this captures its graphs, which takes a while."""
    return GraphSteps(body) if body.control.words.is_cuda else ThreadSteps(body)
