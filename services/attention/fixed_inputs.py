"""A step's inputs at addresses that do not change: arrays and tensors of a step in, what CUDA graphs read out.

To a graph every row is a sequence of its own, a row of a prompt too: it sees what lies in its sequence's blocks up to
its own position.
Legend: T rows of the step, M most blocks of a sequence.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.model.inputs import PagedRows, StepInputs


class FixedInputs:
    """Room for ``rows``, of sequences of up to ``blocks`` blocks. Nothing here waits for the device.

    Args:
        spare_slot: of the KV cache, for rows of no sequence.
    """

    def __init__(self, rows: int, blocks: int, *, block_size: int, spare_slot: int, device: torch.device) -> None:
        self._block_size, self._spare_slot = block_size, spare_slot
        self._pinned = device.type == "cuda"
        self._token_ids_T, self._positions_T, self._slots_T = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._kv_len_T = torch.zeros(rows, dtype=torch.int32, device=device)
        self._blocks_TM = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.clear(0, rows)

    def of(self, rows: int) -> StepInputs:
        """Views of the first ``rows``."""
        return StepInputs(
            token_ids_T=self._token_ids_T[:rows],
            positions_T=self._positions_T[:rows],
            slots_T=self._slots_T[:rows],
            sequences=(),
            logits_rows_R=self._positions_T[:0],
            paged=PagedRows(kv_len_B=self._kv_len_T[:rows], blocks_BM=self._blocks_TM[:rows]),
        )

    def fill(self, inputs: StepInputs, rows: int) -> None:
        """The rows of ``inputs``, and after them nobody's up to ``rows``."""
        count = len(inputs.token_ids_T)
        for fixed_T, step_T in (
            (self._token_ids_T, inputs.token_ids_T),
            (self._positions_T, inputs.positions_T),
            (self._slots_T, inputs.slots_T),
        ):
            fixed_T[:count].copy_(step_T, non_blocking=True)
        torch.add(self._positions_T[:count], 1, out=self._kv_len_T[:count])
        blocks_TM = self._staged(inputs, count)
        self._blocks_TM[:count, : blocks_TM.shape[1]].copy_(blocks_TM, non_blocking=True)
        if count < rows:
            self.clear(count, rows)

    def _staged(self, inputs: StepInputs, count: int) -> Tensor:
        """The block table of the first ``count`` rows, as wide as they need, on the host."""
        decodes, size = inputs.decodes, self._block_size
        longest = max((rows.kv_len for rows in inputs.sequences), default=0)
        if decodes is not None:
            longest = max(longest, int(decodes.kv_len_B.max()))
        staged_TM = torch.empty(count, -(-longest // size), dtype=torch.int32, pin_memory=self._pinned)
        table_TM = staged_TM.numpy()
        if decodes is not None:
            blocks_BM = decodes.blocks_BM[:, : table_TM.shape[1]]
            table_TM[: len(decodes), : blocks_BM.shape[1]] = blocks_BM
        for rows in inputs.sequences:
            used = -(-rows.kv_len // size)
            table_TM[rows.start : rows.start + rows.length, :used] = rows.blocks[:used]
        return staged_TM

    def clear(self, first: int, rows: int) -> None:
        """The rows ``first .. rows`` are nobody's: they see nothing, and nobody reads what they write."""
        self._kv_len_T[first:rows].zero_()
        self._slots_T[first:rows].fill_(self._spare_slot)


def row_buckets(most: int) -> list[int]:
    """Rows that graphs are made for, up to ``most``: 1, 2, then in steps of a quarter to a half.

    >>> row_buckets(40)
    [1, 2, 4, 8, 16, 24, 32, 40]
    """
    sizes = [1, 2, 4, 8]
    while sizes[-1] < most:
        sizes.append(sizes[-1] + (1 << (sizes[-1].bit_length() - 2)) if sizes[-1] >= 16 else 2 * sizes[-1])
    return [size for size in sizes if size < most] + [most]
