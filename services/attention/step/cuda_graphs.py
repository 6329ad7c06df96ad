"""Runs steps as CUDA graphs: the whole forward pass, from embedding to the last layer, in one launch.

There is a graph for each number of rows that steps are rounded up to, and for each key of the link (see
:meth:`services.fabric.link.ExpertLink.graph_key`). Rows, lengths, blocks and seats are data on the device, so the same
graph serves any sequences and any expert workers. Rows of short prompts join those that decode, each like a sequence of
its own. Steps that suit no graph (long prompts, two micro-batches, exchanges by the host) are left to the caller.
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
"""Most rows of a graph. The GPU is the bottleneck of larger steps anyway."""
MAX_READ_BYTES = 4 << 30
"""Most bytes of keys and values that a step's prompts may read in a layer, on average. In a graph each row reads all
that it sees; without one all rows of a prompt read it once. Above this limit an H200 loses more than a graph saves."""

log = logging.getLogger(__name__)


class Capture(Protocol):
    """Records work so that it can be repeated."""

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        """Run ``work``, once or twice. Returns a function that repeats it on the same tensors, in stream order."""
        ...


class CudaCapture:
    """Captures on a stream of its own, in memory that all graphs share: they never run at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool: Any = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()  # compiles and loads kernels, which a capture may not
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
            graph.replay()  # uploads it: later, a colocated seat that waits for rows would delay that
            self._stream.synchronize()
        caller.wait_stream(self._stream)
        self._pool = graph.pool()
        return graph.replay


class StepGraphs(Generic[HandleT]):
    """The graphs of one engine, for one thread at a time: :meth:`replayed` in a step, :meth:`capture_missing` after it.

    Args:
        max_rows: most rows of a step.
        max_len: most positions of a sequence.
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
        blocks = min(kv.num_blocks, max_len // kv.block_size + 1)  # a step launched ahead is one position further
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
        """Steps replayed since the start; a step that ran again counts again."""

    def prepare(self) -> None:
        """Capture all graphs that steps may need with the link as it is now, so that no step waits for that.

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
            log.info(
                "captured CUDA graphs for %d of %d step sizes in %.1f s",
                number,
                len(self._buckets),
                time.monotonic() - began,
            )
        log.info("captured %d CUDA graphs for %d step sizes", self.captures, len(self._buckets))

    def suit(self, inputs: StepInputs) -> bool:
        """Return whether a graph is the right way for ``inputs``, if the link allows one."""
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
        """Run the step that the link has begun, by its graph. Returns ``x_TD``, a copy; None if there is no such graph.

        Args:
            micro_batches: inputs of a step that suits a graph. There are no graphs of two micro-batches.
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
        """Capture the graph that the last step lacked, for later steps. Call it between steps."""
        rows, self._missed = self._missed, 0
        if not rows or self._broken:
            return
        try:
            self._capture_rows(rows)
        except Exception:  # the steps' boundary: they go on without
            self._broken = True
            log.exception("cannot capture a step of %d rows as a CUDA graph; no new graphs will be captured", rows)

    def _capture_rows(self, rows: int) -> bool:
        """Capture a graph of ``rows`` if there is none and the link allows one. Returns whether there is one."""
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
    """Return how many positions the rows at ``start .. end`` of a sequence read in a layer with that window.

    >>> _positions_read(0, 4, None), _positions_read(0, 4, 2), _positions_read(5, 7, 2)
    (10, 7, 4)
    """
    grows = end if window is None else min(max(start, window), end)
    rest = 0 if window is None else (end - grows) * window
    return (grows - start) * (start + 1 + grows) // 2 + rest
