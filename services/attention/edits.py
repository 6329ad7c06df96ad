"""What changes a row's logits before the temperature: penalties, logit_bias, the ban of end tokens.

A token that is drawn but that the host does not know yet counts like the others: it is on the device.
Legend: V vocabulary, 1 a single token or none.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from services.attention.draw_row import DrawRow
from services.model.transfer import upload


def edit_row(logits_V: Tensor, row: DrawRow, after_1: Tensor) -> None:
    """In place. ``after_1``: the token that follows those of ``row``, if one was drawn since; else empty."""
    params, device, ahead = row.params, logits_V.device, len(after_1)
    if params.repetition_penalty != 1:
        seen = torch.cat((_token_tensor(row.token_ids, device), after_1))
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
    """Tokens, and how often each occurs. That of ``after_1`` may be named twice, with the same count."""
    ids, times = np.unique(np.array(generated, dtype=np.int64), return_counts=True)
    seen, counts = upload(ids, after_1.device), upload(times, after_1.device)
    if not len(after_1):
        return seen, counts
    again = seen == after_1
    once_more = 1 + (counts * again).sum(dim=0, keepdim=True)
    return torch.cat((seen, after_1)), torch.cat((counts + again, once_more))


def _token_tensor(token_ids: Sequence[int], device: torch.device) -> Tensor:
    """One id or more as int64. By way of an array: numpy and torch take 0.1 us for each element of a list."""
    return upload(np.frombuffer(array("q", token_ids), dtype=np.int64), device)
