"""How one step's rows attend: the step's sequences in, index tensors and masks out, once per step for all layers.

Decode rows (one new token) of sequences of similar length share one call; a group is padded to its longest, with
reads of each sequence's own blocks. A prompt piece is a call of its own.
Legend: T rows of the step, B sequences of a group, M blocks per sequence, L positions read, W rows of a piece.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.model.inputs import DecodeRows, PagedRows, SequenceRows, StepInputs
from services.model.transfer import upload

_CALL_COST_ELEMENTS = 65_536
"""What one more attention call costs, in key elements read instead: about 60 us on a CPU core at 1 ns each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DecodeGroup:
    """Sequences with one row each. ``rows_B`` None: they are all rows of the step, in order.

    ``mask_B11L`` is 0 where a sequence may look and -inf elsewhere.
    """

    rows_B: Tensor | None
    blocks_BM: Tensor
    mask_B11L: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class PromptPiece:
    """The rows ``start .. start + length`` of one sequence. ``blocks_M`` None: they see only each other.

    ``mask_WL`` None: row w sees the rows up to its own.
    """

    start: int
    length: int
    blocks_M: Tensor | None
    mask_WL: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowPlan:
    """The calls of a layer with one window size. With ``paged`` there is but one, of all rows."""

    decode: tuple[DecodeGroup, ...]
    prompts: tuple[PromptPiece, ...]
    paged: PagedRows | None = None
    window: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionPlan:
    """What every layer needs to know about a step: where keys go, how rows turn, and by window who sees whom."""

    slots_T: Tensor
    cos_T1H: Tensor
    sin_T1H: Tensor
    by_window: dict[int | None, WindowPlan]


class WindowPlanner:
    """Builds :class:`WindowPlan`; masks come in the dtype that attention is computed in.

    Args:
        kv_size: key elements per position and layer; decides when padding is dearer than another call.
    """

    def __init__(self, *, block_size: int, kv_size: int, mask_dtype: torch.dtype, device: torch.device) -> None:
        self._block_size = block_size
        self._call_cost_blocks = _CALL_COST_ELEMENTS / (kv_size * block_size)
        self._mask_dtype = mask_dtype
        self._device = device

    def plan(self, inputs: StepInputs, window: int | None) -> WindowPlan:
        if inputs.paged is not None:
            return WindowPlan(decode=(), prompts=(), paged=inputs.paged, window=window)
        few = [rows for rows in inputs.sequences if rows.length == 1]
        prompts = [rows for rows in inputs.sequences if rows.length > 1]
        decodes = [*self._decode_groups(inputs.decodes, window)] if inputs.decodes is not None else []
        visible = [self._visible_blocks(rows, window) for rows in few]
        decodes += [
            self._group([few[i] for i in group], [visible[i] for i in group], window)
            for group in group_by_length([len(blocks) for blocks in visible], self._call_cost_blocks)
        ]
        if len(decodes) == 1 and not prompts:
            decodes = [replace(decodes[0], rows_B=None)]
        return WindowPlan(decode=tuple(decodes), prompts=tuple(self._piece(rows, window) for rows in prompts))

    def _decode_groups(self, rows: DecodeRows, window: int | None) -> Iterator[DecodeGroup]:
        """Of rows that come as arrays."""
        size, kv_len_B = self._block_size, rows.kv_len_B
        first_B = np.zeros_like(kv_len_B) if window is None else np.maximum(0, kv_len_B - window) // size
        length_B = -(-kv_len_B // size) - first_B
        for group_G in _groups(length_B, self._call_cost_blocks):
            column_L = np.arange(length_B[group_G].max())
            if window is None:
                blocks_GL = rows.blocks_BM[group_G, : len(column_L)]
            else:
                last_B = rows.blocks_BM.shape[1] - 1
                blocks_GL = rows.blocks_BM[group_G[:, None], np.minimum(first_B[group_G, None] + column_L, last_B)]
            last_G = upload((kv_len_B - 1 - first_B * size)[group_G], self._device)
            yield DecodeGroup(
                rows_B=upload(group_G, self._device),
                blocks_BM=upload(blocks_GL, self._device),
                mask_B11L=self._mask(last_G, len(column_L) * size, window)[:, None, None],
            )

    def _visible_blocks(self, rows: SequenceRows, window: int | None) -> Sequence[int]:
        """The blocks that hold what any of the rows may see."""
        return rows.blocks[self._first_block(rows, window) : -(-rows.kv_len // self._block_size)]

    def _first_block(self, rows: SequenceRows, window: int | None) -> int:
        oldest = 0 if window is None else max(0, rows.kv_len - rows.length - window + 1)
        return oldest // self._block_size

    def _group(self, sequences: list[SequenceRows], visible: list[Sequence[int]], window: int | None) -> DecodeGroup:
        widest = max(len(blocks) for blocks in visible)
        padded = [[*blocks, *(blocks[0] for _ in range(widest - len(blocks)))] for blocks in visible]
        skipped = [self._first_block(rows, window) * self._block_size for rows in sequences]
        last = [rows.kv_len - 1 - skip for rows, skip in zip(sequences, skipped, strict=True)]
        return DecodeGroup(
            rows_B=self._indices([rows.start for rows in sequences]),
            blocks_BM=self._indices(padded),
            mask_B11L=self._mask(self._indices(last), widest * self._block_size, window)[:, None, None],
        )

    def _piece(self, rows: SequenceRows, window: int | None) -> PromptPiece:
        from_scratch = rows.kv_len == rows.length
        masked = not from_scratch or (window is not None and window < rows.kv_len)
        first = 0 if from_scratch else self._first_block(rows, window)
        blocks = None if from_scratch else self._visible_blocks(rows, window)
        width = rows.kv_len if blocks is None else len(blocks) * self._block_size
        position_W = torch.arange(rows.kv_len - rows.length, rows.kv_len, device=self._device)
        return PromptPiece(
            start=rows.start,
            length=rows.length,
            blocks_M=None if blocks is None else self._indices(list(blocks)),
            mask_WL=self._mask(position_W - first * self._block_size, width, window) if masked else None,
        )

    def _mask(self, position_R: Tensor, width: int, window: int | None) -> Tensor:
        """``[R, width]``: a row at position p sees the columns up to p, the last ``window`` of them if there is one."""
        column_L = torch.arange(width, device=self._device)
        hidden_RL = column_L > position_R.unsqueeze(1)
        if window is not None:
            hidden_RL |= column_L <= position_R.unsqueeze(1) - window
        mask_RL = torch.zeros(hidden_RL.shape, dtype=self._mask_dtype, device=self._device)
        return mask_RL.masked_fill_(hidden_RL, -torch.inf)

    def _indices(self, values: list[int] | list[list[int]]) -> Tensor:
        return upload(np.array(values, dtype=np.int64), self._device)


def group_by_length(lengths: Sequence[int], call_cost: float) -> list[list[int]]:
    """Indices of ``lengths``, split into groups so that padding each to its longest costs little.

    A cut saves the padding of everything below it and costs ``call_cost``; the best cut is made first, then the two
    sides are looked at again. Longest group first; indices within a group ascend.

    >>> group_by_length([1, 90, 2, 100], call_cost=20)
    [[1, 3], [0, 2]]
    """
    return [group_G.tolist() for group_G in _groups(np.array(lengths, dtype=np.int64), call_cost)]


def _groups(length_B: NDArray[np.int64], call_cost: float) -> Iterator[NDArray[np.int64]]:
    """As :func:`group_by_length`."""
    pending = [np.argsort(-length_B, kind="stable")] if len(length_B) else []
    while pending:
        order = pending.pop()
        sorted_lengths = length_B[order]
        savings = (sorted_lengths[0] - sorted_lengths) * np.arange(len(order), 0, -1)
        cut = int(savings.argmax())
        if savings[cut] <= call_cost:
            yield np.sort(order)
        else:
            pending += [order[cut:], order[:cut]]
