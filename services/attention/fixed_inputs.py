"""A decode step's inputs at addresses that do not change: arrays and tensors of a step in, what CUDA graphs read out.

Legend: T rows of the step, B sequences, M most blocks of a sequence.
"""

from __future__ import annotations

import torch

from services.model.inputs import PagedRows, StepInputs


class FixedInputs:
    """Room for ``rows`` sequences of up to ``blocks`` blocks. Nothing here waits for the device.

    Args:
        spare_slot: of the KV cache, for rows of no sequence.
    """

    def __init__(self, rows: int, blocks: int, *, block_size: int, spare_slot: int, device: torch.device) -> None:
        self._block_size, self._spare_slot = block_size, spare_slot
        self._pinned = device.type == "cuda"
        self._token_ids_T, self._positions_T, self._slots_T = (
            torch.zeros(rows, dtype=torch.int64, device=device) for _ in range(3)
        )
        self._kv_len_B = torch.zeros(rows, dtype=torch.int32, device=device)
        self._blocks_BM = torch.zeros(rows, blocks, dtype=torch.int32, device=device)
        self.clear(0, rows)

    def of(self, rows: int) -> StepInputs:
        """Views of the first ``rows``."""
        return StepInputs(
            token_ids_T=self._token_ids_T[:rows],
            positions_T=self._positions_T[:rows],
            slots_T=self._slots_T[:rows],
            sequences=(),
            logits_rows_R=self._positions_T[:0],
            paged=PagedRows(kv_len_B=self._kv_len_B[:rows], blocks_BM=self._blocks_BM[:rows]),
        )

    def fill(self, inputs: StepInputs, rows: int) -> None:
        """The rows of ``inputs``, which are all of ``decodes``, and after them none up to ``rows``."""
        assert inputs.decodes is not None
        count = len(inputs.decodes)
        for fixed_T, step_T in (
            (self._token_ids_T, inputs.token_ids_T),
            (self._positions_T, inputs.positions_T),
            (self._slots_T, inputs.slots_T),
        ):
            fixed_T[:count].copy_(step_T, non_blocking=True)
        torch.add(self._positions_T[:count], 1, out=self._kv_len_B[:count])
        needed = -(-int(inputs.decodes.kv_len_B.max()) // self._block_size)  # the table is as wide as it ever had to be
        blocks_BM = torch.from_numpy(inputs.decodes.blocks_BM[:, : min(needed, self._blocks_BM.shape[1])])
        staged_BM = torch.empty(blocks_BM.shape, dtype=torch.int32, pin_memory=self._pinned).copy_(blocks_BM)
        self._blocks_BM[:count, : blocks_BM.shape[1]].copy_(staged_BM, non_blocking=True)
        if count < rows:
            self.clear(count, rows)

    def clear(self, first: int, rows: int) -> None:
        """The rows ``first .. rows`` are nobody's: they see nothing, and nobody reads what they write."""
        self._kv_len_B[first:rows].zero_()
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
