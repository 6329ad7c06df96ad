"""Applies penalties to many rows at once: for tokens seen (repetition) and for tokens generated (presence, frequency).

A row's earlier tokens are read on the device (:mod:`services.attention.sampling.histories`), so that the host handles a
few numbers per row, however long it is. Only logits of tokens that occur are written, once for each occurrence, each
time with the same result.
Legend: R rows of the step, V vocabulary, E rows with penalties, P some of these, N blocks of B tokens, L = N x B.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.attention.sampling.histories import History, Tokens
from services.attention.sequences.sequence import DrawRow
from services.model.transfer import upload

Numbered: TypeAlias = tuple[int, DrawRow]
"""A row and its number in the step."""
MAX_TOKENS = 1 << 21
MAX_COUNTS = 1 << 24
"""Most tokens, and most counts (rows times vocabulary), at a time: some 150 MB. A single row may need more."""
MAX_TOKENS_OF_CPU = 1 << 15
"""Most tokens at a time on a CPU, so that the work on them stays in a core's cache."""


class Penalties:
    """Penalties of the rows ``back`` of ``logits_RV``, float32 and contiguous, which they change in place.

    Args:
        history: earlier tokens of the rows ``back``.
        ahead: of how many rows of the step, the first ones, ``history`` has a token that they do not know.
    """

    def __init__(self, logits_RV: Tensor, back: Sequence[Numbered], history: History, ahead: int) -> None:
        self._flat, self._vocab_size, self._history = logits_RV.view(-1), logits_RV.shape[1], history
        self._begin_E = np.array([number for number, _ in back]) * self._vocab_size
        self._prompt_E = np.array([row.prompt_len for _, row in back])
        self._end_E = np.array([row.position(number < ahead) for number, row in back])
        asked = [row.params for _, row in back]
        self._repetition_E = np.array([params.repetition_penalty for params in asked])
        self._presence_E = np.array([params.presence_penalty for params in asked])
        self._frequency_E = np.array([params.frequency_penalty for params in asked])

    def apply(self) -> None:
        """Penalise in each row first the tokens that it has seen, then those that it generated."""
        first_E = np.zeros_like(self._end_E)
        for part_P in self._parts(self._repetition_E != 1, first_E):
            self._repeated(part_P, self._history.look(part_P, first_E[part_P], self._end_E[part_P]))
        first_E = self._prompt_E
        for part_P in self._parts((self._presence_E != 0) | (self._frequency_E != 0), first_E):
            self._generated(part_P, self._history.look(part_P, first_E[part_P], self._end_E[part_P]))

    def _parts(self, asking_E: NDArray[np.bool_], first_E: NDArray[np.int64]) -> Iterator[NDArray[np.int64]]:
        """Yield the rows that ask and have tokens from ``first_E`` on, in parts that are handled at a time."""
        count_E = self._end_E - first_E
        row_P = np.flatnonzero(asking_E & (count_E > 0))
        max_tokens = MAX_TOKENS if self._flat.is_cuda else MAX_TOKENS_OF_CPU
        begin = tokens = 0
        for at, count in enumerate(count_E[row_P].tolist()):
            if at > begin and (tokens + count > max_tokens or (at - begin + 1) * self._vocab_size > MAX_COUNTS):
                yield row_P[begin:at]
                begin, tokens = at, 0
            tokens += count
        if len(row_P):
            yield row_P[begin:]

    def _repeated(self, part_P: NDArray[np.int64], tokens: Tokens) -> None:
        flat, at_L = self._flat, self._places(self._begin_E[part_P], tokens)
        penalty_P = self._repetition_E[part_P]
        both = upload(np.stack((penalty_P, 1 / penalty_P)).astype(np.float32), flat.device)
        penalty_N1, inverse_N1 = (tokens.of_row(each) for each in both)
        value_NB = flat.index_select(0, at_L).view_as(tokens.token_NB)
        # As torch divides by a number: a GPU multiplies by its inverse, which is taken in float64 first.
        lower_NB = value_NB * inverse_N1 if flat.is_cuda else value_NB / penalty_N1
        flat.scatter_(0, at_L, torch.where(value_NB > 0, lower_NB, value_NB * penalty_N1).view(-1))

    def _generated(self, part_P: NDArray[np.int64], tokens: Tokens) -> None:
        flat, at_L = self._flat, self._places(self._begin_E[part_P], tokens)
        asked = upload(np.stack((self._presence_E[part_P], self._frequency_E[part_P])), flat.device)
        presence_N1, frequency_N1 = (tokens.of_row(each) for each in asked)
        less_NB = (self._times(len(part_P), tokens) * frequency_N1).add_(presence_N1).float()
        flat.scatter_(0, at_L, flat.index_select(0, at_L).sub_(less_NB.view(-1)))

    def _times(self, rows: int, tokens: Tokens) -> Tensor:
        """Return how often each token occurs in its row, float64. Counts of other tokens are not written."""
        at_L = self._places(np.arange(rows) * self._vocab_size, tokens)
        counts = torch.empty(rows * self._vocab_size, dtype=torch.int32, device=at_L.device)
        counts.index_fill_(0, at_L, 0).scatter_add_(0, at_L, tokens.times().view(-1))
        return counts.index_select(0, at_L).view_as(tokens.token_NB).double()

    def _places(self, begin_P: NDArray[np.int64], tokens: Tokens) -> Tensor:
        """Return the places ``at_L`` of the tokens, where the vocabulary of each row begins at ``begin_P``."""
        return (tokens.of_row(upload(begin_P, self._flat.device)) + tokens.token_NB).view(-1)
