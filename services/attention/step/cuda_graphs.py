"""Runs steps as CUDA graphs: the whole forward pass, from embedding to the last layer, in one launch.

There is a graph for each number of rows that steps are rounded up to, for steps of decodes alone and for steps with
pieces of prompts (one for both where work lists are uniform), and for each key of the link (see
:meth:`services.fabric.link.ExpertLink.graph_key`). Rows, lengths, blocks and seats are data on the device, so the same
graph serves any sequences and any expert workers. Steps that suit no graph (very many rows, two micro-batches,
exchanges by the host, pieces of prompts of a model without work lists or with recurrent layers, whose chunks are as the
prompts are long) are left to the caller.
Legend: T rows of the step, D hidden size.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Generic, Protocol, TypeVar
from weakref import ReferenceType, ref

import torch
from torch import Tensor

from services.attention.kv_cache import KVCache
from services.attention.step.fixed_inputs import FixedDecodes, FixedInputs, FixedPieces, Shape
from services.attention.step.forward import forward
from services.errors import ConfigError
from services.fabric.link import ExpertLink
from services.model.dense import DenseModel
from services.model.inputs import StepInputs
from services.runtime.collecting import no_collection

HandleT = TypeVar("HandleT")
MAX_ROWS = 2048
"""Most rows of a graph. Launches of larger steps take less time than the GPU does."""

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
        self._last: ReferenceType[Any] | None = None

    def __call__(self, work: Callable[[], None]) -> Callable[[], None]:
        caller = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(caller)
        with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
            work()  # compiles and loads kernels, which a capture may not
            self._stream.synchronize()
            graph = torch.cuda.CUDAGraph()
            with no_collection():
                # Other threads use the GPU meanwhile: links, lanes, metrics.
                graph.capture_begin(pool=self._pool(), capture_error_mode="thread_local")
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
        self._last = ref(graph)
        return graph.replay

    def _pool(self) -> Any:
        """Return the memory of the graphs; None where all of them are gone, and it with them."""
        last = None if self._last is None else self._last()
        return None if last is None else last.pool()


class StepGraphs(Generic[HandleT]):
    """The graphs of one engine, for one thread at a time: :meth:`replayed` in a step, :meth:`capture_missing` after it.

    Args:
        max_rows: most rows of a step.
        max_seqs: most sequences of a step.
        max_len: most positions of a sequence.
        trees: whether drafts of a sequence may branch.
    """

    def __init__(
        self,
        model: DenseModel,
        link: ExpertLink[HandleT],
        kv: KVCache,
        *,
        capture: Capture,
        max_rows: int,
        max_seqs: int,
        max_len: int,
        trees: bool = False,
    ) -> None:
        self._model, self._link, self._kv, self._capture = model, link, kv, capture
        most, device = min(max_rows, MAX_ROWS), model.device
        shape = Shape(
            # a step launched ahead is one position further
            blocks=min(kv.num_blocks, max_len // kv.block_size + 1),
            block_size=kv.block_size,
            spare_slot=kv.spare_slot,
            states=model.spec.recurrent is not None,
        )
        lists = model.work_lists()
        self._pieces = None
        if lists is not None and not shape.states:
            self._pieces = FixedPieces(most, max_seqs, shape, lists, device, trees=trees)
        self._decodes: FixedInputs | None = self._pieces
        if lists is None or not lists.uniform:
            self._decodes = FixedDecodes(min(most, max_seqs), shape, device)
        self._x_TD = torch.zeros(most, model.spec.hidden_size, dtype=model.dtype, device=device)
        self._graphs: dict[tuple[FixedInputs, int, Hashable], Callable[[], None]] = {}
        self._missed: tuple[FixedInputs, int] | None = None
        self._broken = False
        self.max_rows = most
        """Most rows of a step that suits a graph. :meth:`prepare` lowers it to what the link allows."""
        self.captures, self.failures = 0, 0
        """Graphs that were captured, and attempts that failed."""
        self.steps = 0
        """Steps replayed since the start; a step that ran again counts again."""

    def prepare(self) -> None:
        """Capture all graphs that steps may need with the link as it is now, so that no step waits for that. Where the
        device does not allow one, this and smaller ones are left out, and their steps run eagerly.

        Raises:
            ConfigError: memory does not suffice.
        """
        began = time.monotonic()
        each = dict.fromkeys(kind for kind in (self._pieces, self._decodes) if kind is not None)
        kinds = [(kind, rows) for kind in each for rows in reversed(kind.buckets)]
        for number, (kind, rows) in enumerate(kinds, start=1):  # the largest first: it sizes the pool
            try:
                if not self._capture_rows(kind, rows):
                    continue
            except Exception as error:
                if "out of memory" not in str(error):
                    self._give_up(rows)
                    break
                reason = str(error).splitlines()[0]
                raise ConfigError(
                    f"Steps of {rows} rows cannot be captured as a CUDA graph: {reason}.",
                    hint="Start with --enforce-eager, or leave more memory free: --gpu-memory-utilization, "
                    "--kv-memory-gib, --max-num-batched-tokens.",
                ) from error
            log.info(
                "captured CUDA graphs for %d of %d step sizes in %.1f s", number, len(kinds), time.monotonic() - began
            )
        self.max_rows = max((rows for _, rows, _ in self._graphs), default=self.max_rows)
        log.info("captured %d CUDA graphs for %d step sizes", self.captures, len(kinds))

    def suit(self, inputs: StepInputs) -> bool:
        """Return whether a graph is the right way for ``inputs``, if the link allows one."""
        kind = self._kind(inputs)
        return kind is not None and len(inputs.token_ids_T) <= min(self.max_rows, kind.buckets[-1])

    def _kind(self, inputs: StepInputs) -> FixedInputs | None:
        return self._pieces if inputs.sequences else self._decodes

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
        kind = self._kind(inputs)
        assert kind is not None, "it does not suit a graph"
        rows = next(size for size in kind.buckets if size >= count)
        graph = self._graphs.get((kind, rows, key))
        if graph is None:
            self._missed = kind, rows
            return None
        kind.fill(inputs, rows)
        graph()
        self.steps += 1
        return self._x_TD[:count].clone()

    def capture_missing(self) -> None:
        """Capture the graph that the last step lacked, for later steps. Call it between steps."""
        missed, self._missed = self._missed, None
        if missed is None or self._broken:
            return
        kind, rows = missed
        try:
            self._capture_rows(kind, rows)
        except Exception:  # noqa: BLE001  the steps' boundary: they go on without
            self._give_up(rows)

    def _give_up(self, rows: int) -> None:
        """Capture nothing any more, since a step of ``rows`` rows raised."""
        self._broken = True
        self.failures += 1
        log.exception("cannot capture a step of %d rows as a CUDA graph; no new graphs will be captured", rows)

    def _capture_rows(self, kind: FixedInputs, rows: int) -> bool:
        """Capture a graph of ``rows`` if there is none and the link allows one. Returns whether there is one."""
        with torch.inference_mode(), self._link.capture_context(rows) as key:
            if key is None or (kind, rows, key) in self._graphs:
                return key is not None
            kind.clear(rows)
            self._graphs[kind, rows, key] = self._capture(partial(self._forward, kind, rows))
            self.captures += 1
            return True

    def _forward(self, kind: FixedInputs, rows: int) -> None:
        self._x_TD[:rows].copy_(forward(self._model, self._link, self._kv, (kind.of(rows),)))
