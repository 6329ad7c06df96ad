"""Steps as CUDA graphs: the whole forward pass of a step, from embedding to the last layer, in one launch.

There is a graph for each number of rows that steps are rounded up to, and for each key of the link (see
:meth:`services.fabric.link.ExpertLink.graph_key`). Rows, lengths, blocks and seats are words on the device, so the
same graph serves whichever sequences have the rows and whichever workers have the experts. Rows of short prompts are in
it beside those that decode, each as if it were a sequence of its own. What is not for a graph (long prompts,
micro-batches in ping-pong, exchanges that need the host) is left to the caller.
Legend: T rows of the step, D hidden size.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from services.attention.kv_cache import KVCache
from services.attention.step.fixed_inputs import FixedInputs, row_buckets
from services.attention.step.forward import forward
from services.errors import ConfigError
from services.fabric.link import ExpertLink
from services.model.dense import DenseModel
from services.model.inputs import StepInputs
from services.runtime.collecting import no_collection

HandleT = TypeVar("HandleT")
MAX_ROWS = 512
"""Larger steps are bound by the GPU anyway."""
MAX_READ_BYTES = 4 << 30
"""Of keys and values in a layer, on average, by the rows of a step's prompts: in a graph each row reads all that it
sees, else all rows of a prompt read it once. On an H200 that costs more than launching kernels one by one from
somewhere above this on."""

log = logging.getLogger(__name__)


class Capture(Protocol):
    """Makes a piece of work repeatable."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """``work`` runs here at least once. What is returned does the same again, on the same tensors, in the order
        of the current stream."""
        ...


class CudaCapture:
    """Captures on a stream of its own, in memory that all graphs share: they never run at the same time. ``work`` has
    run twice by then."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()  # compiles and loads what a capture may not
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with no_collection():
                # Other threads use the GPU meanwhile: links, lanes, metrics.
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                except BaseException:
                    with suppress(RuntimeError):  # the cause says more
                        graph.capture_end()
                    raise
                graph.capture_end()
            graph.replay()  # uploads it, which a seat beside this worker that waits for rows would hold up
            self._stream.synchronize()
        caller.wait_stream(self._stream)
        self._pool = graph.pool()
        return graph.replay


class StepGraphs(Generic[HandleT]):
    """For one engine, used by one thread at a time. A step is :meth:`replayed`, then :meth:`capture_missing` is called.

    Args:
        max_rows: of a step, at most; larger ones suit no graph.
        max_len: positions of a sequence, at most.
    """

    def __init__(
        self,
        model: DenseModel,
        link: ExpertLink[HandleT],
        kv: KVCache,
        *,
        capture: Capture,
        max_rows: int,
        max_len: int,
    ) -> None:
        self._model, self._link, self._kv, self._capture = model, link, kv, capture
        self._buckets = row_buckets(min(max_rows, MAX_ROWS))
        blocks = min(kv.num_blocks, max_len // kv.block_size + 1)  # a step ahead may be one position further
        self._inputs = FixedInputs(
            self._buckets[-1], blocks, block_size=kv.block_size, spare_slot=kv.spare_slot, device=model.device
        )
        self._windows = Counter(layer.window for layer in model.spec.layers)
        self._position_bytes = 2 * model.spec.kv_size * model.dtype.itemsize
        self._x_TD = torch.zeros(
            self._buckets[-1], model.spec.hidden_size, dtype=model.dtype, device=model.device
        )  # fmt: skip
        self._graphs: dict[tuple[int, Hashable], Callable[[], None]] = {}
        self._missed = 0
        self._broken = False
        self.captures = 0
        self.steps = 0
        """Replayed since the start, again where one was run again."""

    def prepare(self) -> None:
        """Capture all that steps may ask for now, so that none of them waits for it.

        Raises:
            ConfigError: this device, or its memory, does not allow it.
        """
        began = time.monotonic()
        for number, rows in enumerate(reversed(self._buckets), start=1):  # the largest first: it sizes the pool
            try:
                if not self._capture_rows(rows):
                    continue
            except Exception as error:
                reason = next(iter(str(error).splitlines()), type(error).__name__)
                raise ConfigError(
                    f"Steps of {rows} rows cannot be captured as a CUDA graph: {reason}.",
                    hint="Start with --enforce-eager, or leave more memory free: --kv-memory-gib, "
                    "--max-num-batched-tokens.",
                ) from error
            log.info("graphs of steps %d/%d after %.1f s", number, len(self._buckets), time.monotonic() - began)
        log.info("%d graphs captured for %d sizes of steps", self.captures, len(self._buckets))

    def suit(self, inputs: StepInputs) -> bool:
        """Whether a graph is right for ``inputs``, if the link lets there be one."""
        if len(inputs.token_ids_T) > self._buckets[-1]:
            return False
        pieces = [(rows.kv_len - rows.length, rows.kv_len) for rows in inputs.sequences]
        read = sum(
            layers * _positions_read(start, end, window)
            for start, end in pieces
            for window, layers in self._windows.items()
        )
        return read * self._position_bytes <= MAX_READ_BYTES * self._model.spec.num_layers

    def replayed(self, micro_batches: Sequence[StepInputs]) -> Tensor | None:
        """``x_TD`` of the step that the link has begun, the caller's to keep; None if no graph can compute it.

        Args:
            micro_batches: of a step that suits one; of two there are none.
        """
        inputs, *others = micro_batches
        if others:
            return None
        key, count = self._link.graph_key(), len(inputs.token_ids_T)
        if key is None:
            return None
        rows = next(size for size in self._buckets if size >= count)
        graph = self._graphs.get((rows, key))
        if graph is None:
            self._missed = rows
            return None
        self._inputs.fill(inputs, rows)
        graph()
        self.steps += 1
        return self._x_TD[:count].clone()

    def capture_missing(self) -> None:
        """Capture the graph that the last step lacked, for the next one. Called after a step has ended."""
        rows, self._missed = self._missed, 0
        if not rows or self._broken:
            return
        try:
            self._capture_rows(rows)
        except Exception:  # the steps' boundary: they go on without
            self._broken = True
            log.exception("A step of %d rows cannot be captured; from here on new ones are not.", rows)

    def _capture_rows(self, rows: int) -> bool:
        """Whether there is a graph for the link's key now."""
        with torch.inference_mode(), self._link.capture_context(rows) as key:
            if key is None or (rows, key) in self._graphs:
                return key is not None
            self._inputs.clear(0, rows)
            self._graphs[rows, key] = self._capture(partial(self._forward, rows))
            self.captures += 1
            return True

    def _forward(self, rows: int) -> None:
        self._x_TD[:rows].copy_(forward(self._model, self._link, self._kv, (self._inputs.of(rows),)))


def _positions_read(start: int, end: int, window: int | None) -> int:
    """By the rows at the positions ``start .. end`` of a sequence, of a layer with that window.

    >>> _positions_read(0, 4, None), _positions_read(0, 4, 2), _positions_read(5, 7, 2)
    (10, 7, 4)
    """
    grows = end if window is None else min(max(start, window), end)
    rest = 0 if window is None else (end - grows) * window
    return (grows - start) * (start + 1 + grows) // 2 + rest
