"""Changes rows' logits before the temperature: penalties, logit_bias, the ban of end tokens.

All rows of a step are changed at once, with little work on the host for each row. Penalties look up earlier tokens on
the device (:mod:`services.attention.sampling.penalties`); biases and bans stay there while the same rows need them.
Legend: R rows of the step, V vocabulary, L tokens whose logits change, of all rows together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.attention.sampling.histories import History
from services.attention.sampling.penalties import Numbered, Penalties
from services.attention.sequences.sequence import DrawRow
from services.model.transfer import upload


class Edits:
    """Edits logits over a vocabulary of ``vocab_size`` on ``device``."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._biases = _Registered(vocab_size, device, _biases)
        self._bans = _Registered(vocab_size, device, lambda row: _bans(row, vocab_size))

    def of(self, logits_RV: Tensor, rows: Sequence[DrawRow], history: History | None, ahead: int) -> Tensor:
        """Return ``logits_RV`` as ``rows`` edit them, or the tensor itself if no row edits.

        Args:
            history: earlier tokens of the rows that look back, in their order; None if no row does.
            ahead: of how many of ``rows``, the first ones, ``history`` has a token that they do not know.
        """
        asking = [(number, row) for number, row in enumerate(rows) if row.may_edit]
        back = [each for each in asking if each[1].looks_back]
        biases = self._biases.of([each for each in asking if each[1].params.logit_bias])
        bans = self._bans.of([each for each in asking if each[1].bans_stop(each[0] < ahead)])
        if not back and biases is None and bans is None:
            return logits_RV
        edited_RV = logits_RV.clone(memory_format=torch.contiguous_format)
        flat = edited_RV.view(-1)
        if back:
            assert history is not None
            Penalties(edited_RV, back, history, ahead).apply()
        if biases is not None:
            at_L, bias_L = biases
            flat.scatter_(0, at_L, flat.index_select(0, at_L).add_(bias_L))
        if bans is not None:
            at_L, never_L = bans
            flat.scatter_(0, at_L, never_L)
        return edited_RV


class _Registered:
    """Values for some tokens of some rows, made and uploaded again when other rows need them.

    Args:
        of_row: returns token ids of a row, no id twice, and their values.
    """

    def __init__(
        self,
        vocab_size: int,
        device: torch.device,
        of_row: Callable[[DrawRow], tuple[NDArray[np.int64], NDArray[np.float32]]],
    ) -> None:
        self._vocab_size, self._device, self._of_row = vocab_size, device, of_row
        self._asking: Sequence[Numbered] = []
        self._made: dict[DrawRow, tuple[NDArray[np.int64], NDArray[np.float32]]] = {}
        self._flat: tuple[Tensor, Tensor] | None = None

    def of(self, asking: Sequence[Numbered]) -> tuple[Tensor, Tensor] | None:
        """Return ``(at_L, value_L)``, with ``at_L`` counted through the logits of all rows; None without rows."""
        if asking != self._asking:
            self._made = {row: self._made.get(row) or self._of_row(row) for _, row in asking}
            self._flat = self._uploaded(asking) if asking else None
            self._asking = asking
        return self._flat

    def _uploaded(self, asking: Sequence[Numbered]) -> tuple[Tensor, Tensor]:
        at_L = np.concatenate([self._made[row][0] + number * self._vocab_size for number, row in asking])
        value_L = np.concatenate([self._made[row][1] for _, row in asking])
        return upload(at_L, self._device), upload(value_L, self._device)


def _biases(row: DrawRow) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    bias = row.params.logit_bias
    return np.array(list(bias), dtype=np.int64), np.array(list(bias.values()), dtype=np.float32)


def _bans(row: DrawRow, vocab_size: int) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
    banned = [token for token in row.stop_ids if 0 <= token < vocab_size]
    return np.array(banned, dtype=np.int64), np.full(len(banned), -np.inf, dtype=np.float32)
