"""The rows of the small steps in which a draft model goes on from its own tokens: one row of each sequence.

Legend: B sequences, M blocks of a sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.attention.sequences.sequence import SequenceState
from services.model.inputs import DecodeRows, StepInputs
from services.model.transfer import upload


class NextRows:
    """Rows behind the known tokens of ``states``, which have blocks for them that stay."""

    def __init__(self, states: Sequence[SequenceState], block_size: int, device: torch.device) -> None:
        self._size, self._device = block_size, device
        self._known_B = np.array([len(state.token_ids) for state in states], dtype=np.int64)
        width = max(len(state.blocks) for state in states)
        filled = [[*state.blocks, *[state.blocks[-1]] * (width - len(state.blocks))] for state in states]
        self._blocks_BM = np.array(filled, dtype=np.int64)

    def of(self, number: int, tokens_B: Tensor) -> StepInputs:
        """Return the rows of ``tokens_B``: of the first sequences the draft with this ``number``, counted from 0."""
        count = len(tokens_B)
        position_B, blocks_BM = self._known_B[:count] + number, self._blocks_BM[:count]
        slot_B = blocks_BM[np.arange(count), position_B // self._size] * self._size + position_B % self._size
        positions_T, slots_T = upload(np.stack((position_B, slot_B)), self._device).unbind()
        return StepInputs(
            token_ids_T=tokens_B,
            positions_T=positions_T,
            slots_T=slots_T,
            sequences=(),
            logits_rows_R=positions_T[:0],
            decodes=DecodeRows(kv_len_B=position_B + 1, blocks_BM=blocks_BM),
        )
