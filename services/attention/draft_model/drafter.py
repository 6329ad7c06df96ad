"""A draft model with its cache and its CUDA graphs, as long as its engine lives.

The cache has the engine's KV blocks by the same numbers, so that the pool, preemptions and names stay single. Steps of
few rows, which drafting takes one by one, are replayed as graphs, those of prompts are launched.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from services.attention.draft_model.speculator import Computing, ModelSpeculator
from services.attention.kv_cache import KVCache
from services.attention.speculation.speculator import Speculator
from services.attention.step.cuda_graphs import Capture, StepGraphs
from services.attention.step.engine import EngineOptions
from services.fabric.link import ExpertLink
from services.model.dense import DenseModel


class ModelDrafter:
    """Makes speculators of ``model``, whose experts, if it has any, are behind ``link`` in this process.

    Args:
        options: those of the engine, with ``kv_blocks``.
        capture: None: no step is captured.
    """

    def __init__(
        self, model: DenseModel, link: ExpertLink[Any], options: EngineOptions, capture: Capture | None = None
    ) -> None:
        assert options.kv_blocks is not None
        self._model, self._link, self._options, self._capture = model, link, options, capture
        self._kv = KVCache(
            model.spec,
            num_blocks=options.kv_blocks,
            block_size=options.block_size,
            dtype=model.dtype,
            device=model.device,
        )
        self._graphs = self._new_graphs()
        self.failures: Counter[str] = Counter()

    def speculator(self) -> Speculator:
        parts = Computing(self._model, self._link, self._kv, self._graphs)
        return ModelSpeculator(parts, self._options, self.failures)

    def prepare(self) -> None:
        if self._graphs is not None:
            self._graphs.prepare()

    def free(self) -> None:
        self._graphs = None
        self._kv.free()

    def allocate(self) -> None:
        self._kv.allocate()
        self._graphs = self._new_graphs()

    def _new_graphs(self) -> StepGraphs[Any] | None:
        if self._capture is None:
            return None
        options = self._options
        return StepGraphs(
            self._model,
            self._link,
            self._kv,
            capture=self._capture,
            max_rows=min(options.max_num_batched_tokens, 2 * options.max_num_seqs),
            max_seqs=options.max_num_seqs,
            max_len=options.max_model_len or self._model.spec.max_position,
        )
