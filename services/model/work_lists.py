"""Work lists of paged attention for a step's sequences: see :mod:`moe_kernels.paged_attention.planner`.

Legend: S sequences, T rows of the step, M blocks of a sequence, at most.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray

from moe_kernels.paged_attention.planner import Planner
from moe_kernels.paged_attention.tiling import tiling_for
from moe_kernels.paged_attention.trees import TreeRows
from moe_kernels.paged_attention.work import Work
from services.model.inputs import PagedPieces, PagedRows, StepInputs
from services.model.spec import ModelSpec
from services.model.transfer import upload

Planners = Mapping[int | None, Planner]
"""A planner for each window of the model's layers."""
_HOPPER = (9, 0)
_CPU_PROGRAMS = 8
SPLIT = 4096
"""Positions after which a uniform list cuts what a row sees. Less would keep more programs busy with long sequences,
and take more memory for the sums of parts: each row of a step has as many as the longest sequence."""


class WorkLists:
    """Plans attention of any step for one model on one device.

    Args:
        dtype: of the queries.
        uniform: a row meets its positions in the same tiles and parts whatever the step has besides it: there is one
            kind of tile, that of prompts, for all rows, and sequences are cut where :data:`SPLIT` says.
    """

    def __init__(self, spec: ModelSpec, *, dtype: torch.dtype, device: torch.device, uniform: bool = False) -> None:
        on_gpu = device.type == "cuda"
        self._windows = {layer.window for layer in spec.layers}
        self._device = device
        tiling = tiling_for(
            heads=spec.num_heads,
            kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            itemsize=dtype.itemsize,
            multiprocessors=torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else _CPU_PROGRAMS,
            warpgroups=not on_gpu or torch.cuda.get_device_capability(device) >= _HOPPER,
        )
        self.uniform = uniform
        self._tiling = tiling.uniform() if uniform else tiling
        self._split = SPLIT if uniform else None

    def planners(self, *, rows: int, sequences: int, positions: int, trees: bool) -> Planners:
        """Return planners for steps of ``rows`` rows of at most so many sequences of at most so many positions.

        Args:
            trees: whether rows may branch.
        """
        sizes = {"rows": rows, "sequences": sequences, "positions": positions}
        return {
            window: Planner(self._tiling, **sizes, window=window, split=self._split, trees=trees)
            for window in self._windows
        }

    def of(self, inputs: StepInputs, block_size: int) -> PagedRows | PagedPieces:
        """Return the attention of a step with at least one row, whose tensors nothing will fill again."""
        rows_S, kv_len_S, table_SM = sequences_of(inputs, block_size)
        blocks_SM = upload(table_SM, self._device)
        if not inputs.sequences and not self.uniform:
            return PagedRows(kv_len_B=upload(kv_len_S.astype(np.int32), self._device), blocks_BM=blocks_SM)
        trees = trees_of(inputs)
        planners = self.planners(
            rows=len(inputs.token_ids_T),
            sequences=len(rows_S),
            positions=table_SM.shape[1] * block_size,
            trees=bool(trees),
        )
        plans = {window: planner.plan(rows_S, kv_len_S, trees) for window, planner in planners.items()}
        words = {window: upload(words_W, self._device) for window, words_W in plans.items()}
        return PagedPieces(
            blocks_SM=blocks_SM, work={window: Work.of(planners[window], words_W) for window, words_W in words.items()}
        )


def trees_of(inputs: StepInputs) -> dict[int, TreeRows]:
    """Return of each sequence of a step whose rows branch, by its number, how they do."""
    pieces = enumerate(inputs.sequences, start=len(inputs.decodes or ()))
    return {number: piece.tree for number, piece in pieces if piece.tree is not None}


def sequences_of(inputs: StepInputs, block_size: int) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int32]]:
    """Return rows and length of each sequence of a step, and its blocks: ``rows_S``, ``kv_len_S``, ``table_SM``."""
    decodes, pieces = inputs.decodes, inputs.sequences
    first = len(decodes or ())
    rows_S, kv_len_S = np.ones(first + len(pieces), dtype=np.int64), np.empty(first + len(pieces), dtype=np.int64)
    if decodes is not None:
        kv_len_S[:first] = decodes.kv_len_B
    rows_S[first:] = [piece.length for piece in pieces]
    kv_len_S[first:] = [piece.kv_len for piece in pieces]
    table_SM = np.zeros((len(rows_S), -(-int(kv_len_S.max()) // block_size)), dtype=np.int32)
    if decodes is not None:
        blocks_BM = decodes.blocks_BM[:, : table_SM.shape[1]]
        table_SM[:first, : blocks_BM.shape[1]] = blocks_BM
    for number, piece in enumerate(pieces, start=first):
        used = -(-piece.kv_len // block_size)
        table_SM[number, :used] = piece.blocks[:used]
    return rows_S, kv_len_S, table_SM
