"""Keeps a step's inputs at fixed addresses, for CUDA graphs to read.

A graph takes every row, also of a prompt, as a sequence that sees its blocks up to the row's position.
Legend: T rows of the step, M blocks of a sequence, at most.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from services.model.inputs import PagedRows, StepInputs
from services.model.transfer import upload


class FixedInputs:
    """Tensors for up to ``rows`` rows of sequences of up to ``blocks`` blocks. No method waits for the device.

    Args:
        spare_slot: slot of the KV cache for rows of no sequence.
    """

    def __init__(self, rows: int, blocks: int, *, block_size: int, spare_slot: int, device: torch.device) -> None:
        self._block_size, self._spare_slot = block_size, spare_slot
        self._device, self._pinned = device, device.type == "cuda"
        self._token_ids_T, self._positions_T, self._slots_T = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._kv_len_T = torch.zeros(rows, dtype=torch.int32, device=device)
        self._blocks_TM = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.clear(0, rows)

    def of(self, rows: int) -> StepInputs:
        """Return the first ``rows`` rows, as views."""
        return StepInputs(
            token_ids_T=self._token_ids_T[:rows],
            positions_T=self._positions_T[:rows],
            slots_T=self._slots_T[:rows],
            sequences=(),
            logits_rows_R=self._positions_T[:0],
            paged=PagedRows(kv_len_B=self._kv_len_T[:rows], blocks_BM=self._blocks_TM[:rows]),
        )

    def fill(self, inputs: StepInputs, rows: int) -> None:
        """Copy the rows of ``inputs``, and clear those after them up to ``rows``."""
        count = len(inputs.token_ids_T)
        for fixed_T, step_T in (
            (self._token_ids_T, inputs.token_ids_T),
            (self._positions_T, inputs.positions_T),
            (self._slots_T, inputs.slots_T),
        ):
            fixed_T[:count].copy_(step_T, non_blocking=True)
        torch.add(self._positions_T[:count], 1, out=self._kv_len_T[:count])
        blocks_TM = self._block_rows(inputs)
        self._blocks_TM[:count, : blocks_TM.shape[1]].copy_(blocks_TM, non_blocking=True)
        if count < rows:
            self.clear(count, rows)

    def _block_rows(self, inputs: StepInputs) -> Tensor:
        """Return the blocks of each row, as many as any row needs; on the host where all rows are decodes."""
        decodes, pieces = inputs.decodes, inputs.sequences
        lengths = [rows.kv_len for rows in pieces]
        if decodes is not None:
            lengths.append(int(decodes.kv_len_B.max()))
        first, width = len(decodes or ()), -(-max(lengths) // self._block_size)
        staged_SM = torch.empty(first + len(pieces), width, dtype=torch.int32, pin_memory=self._pinned)
        table_SM = staged_SM.numpy()
        if decodes is not None:
            blocks_BM = decodes.blocks_BM[:, :width]
            table_SM[:first, : blocks_BM.shape[1]] = blocks_BM
        for number, rows in enumerate(pieces, start=first):
            used = -(-rows.kv_len // self._block_size)
            table_SM[number, :used] = rows.blocks[:used]
        if not pieces:
            return staged_SM
        of_row_T = np.repeat(np.arange(len(table_SM)), [1] * first + [rows.length for rows in pieces])
        return staged_SM.to(self._device, non_blocking=True)[upload(of_row_T, self._device)]

    def clear(self, first: int, rows: int) -> None:
        """Make ``first .. rows`` rows of no sequence: they see nothing, and nobody reads what they write."""
        self._kv_len_T[first:rows].zero_()
        self._token_ids_T[first:rows].zero_()
        self._slots_T[first:rows].fill_(self._spare_slot)


def row_buckets(max_rows: int) -> list[int]:
    """Return the numbers of rows that graphs are made for: doubling up to 16, then growing by a quarter to a half.

    >>> row_buckets(40)
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < max_rows:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 2)) if sizes[-1] >= 16 else 2 * sizes[-1])
    return [size for size in sizes if size < max_rows] + [max_rows]
