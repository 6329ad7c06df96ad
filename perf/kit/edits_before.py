"""Edits of logits row by row and from the whole list of a row's tokens, as it was done first: the host's work grew with
the context. Stands in for :class:`services.attention.sampling.edits.Edits`, to measure both and to see that nothing
changed.

Legend: R rows, V vocabulary, 1 a single token or none.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.attention.sampling.histories import History
from services.attention.sequences.sequence import DrawRow
from services.model.transfer import upload


class EditsBefore:
    """``after_R``: on the device, the tokens that the host does not know."""

    def __init__(self) -> None:
        self.after_R: Tensor | None = None

    def of(self, logits_RV: Tensor, rows: Sequence[DrawRow], _history: History | None, ahead: int) -> Tensor:
        edited = [index for index, row in enumerate(rows) if row.may_edit]
        if not edited:
            return logits_RV
        logits_RV = logits_RV.clone()
        nothing = torch.empty(0, dtype=torch.int64, device=logits_RV.device)
        for index in edited:
            after_1 = self.after_R[index : index + 1] if ahead and self.after_R is not None else nothing
            _edit_row(logits_RV[index], rows[index], after_1)
        return logits_RV


def _edit_row(logits_V: Tensor, row: DrawRow, after_1: Tensor) -> None:
    params, device, ahead = row.params, logits_V.device, len(after_1)
    if params.repetition_penalty != 1:
        known = upload(np.frombuffer(array("q", row.token_ids), dtype=np.int64), device)
        seen = torch.cat((known, after_1))
        values = logits_V[seen]
        logits_V[seen] = torch.where(values > 0, values / params.repetition_penalty, values * params.repetition_penalty)
    if (params.presence_penalty or params.frequency_penalty) and row.generated(ahead):
        seen, counts = _counted(row.token_ids[row.prompt_len :], after_1)
        logits_V[seen] -= (params.presence_penalty + params.frequency_penalty * counts.double()).float()
    if params.logit_bias:
        biased = upload(np.array(list(params.logit_bias)), device)
        logits_V[biased] += upload(np.array(list(params.logit_bias.values()), dtype=np.float32), device)
    if row.bans_stop(ahead):
        banned = [token for token in row.stop_ids if 0 <= token < logits_V.numel()]
        logits_V[upload(np.array(banned, dtype=np.int64), device)] = -torch.inf


def _counted(generated: Sequence[int], after_1: Tensor) -> tuple[Tensor, Tensor]:
    ids, times = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
    seen, counts = upload(ids, after_1.device), upload(times, after_1.device)
    if not len(after_1):
        return seen, counts
    again = seen == after_1
    once_more = 1 + (counts * again).sum(dim=0, keepdim=True)
    return torch.cat((seen, after_1)), torch.cat((counts + again, once_more))
