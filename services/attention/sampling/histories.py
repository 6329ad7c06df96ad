"""Reads the tokens before a draw on the device, from the slots that also hold their keys and values.

A step writes its tokens into their slots before it draws (:mod:`services.attention.step.forward`), so all tokens before
a draw are there, even one that the host does not know yet. The host only uploads each row's blocks, once, and the range
of positions, each step. Nothing is counted from step to step, so nothing has to be undone when a step runs again or is
discarded, or restored when a sequence is recomputed or takes its prefix from another one.
Of a tree of drafts a slot has one token only: rows of other branches get theirs from the host, which drafted them.
Legend: E rows that look back, P some of these, M blocks of a sequence, S slots, N blocks that all P read together,
B slots of a block, F blocks at the edges: the first and the last of each row, A tokens of other branches.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from services.attention.kv_cache import KVCache
from services.attention.sequences.plan import StepPlan
from services.model.transfer import upload

_SLACK = 16
"""Spare columns, so that the tensor seldom has to grow."""


@dataclass(frozen=True, slots=True)
class Tokens:
    """Tokens of some rows, in whole blocks. Slots outside the range that was asked for repeat a token of their row."""

    row_N: Tensor
    """The row of each block, counted among these rows."""
    token_NB: Tensor
    edge_F: Tensor
    """Blocks that may have slots outside the range."""
    asked_FB: Tensor
    """Which slots of these blocks are inside the range."""

    def of_row(self, values_P: Tensor) -> Tensor:
        """Give each block the value of its row, ``[N, 1]``."""
        return values_P.index_select(0, self.row_N)[:, None]

    def times(self) -> Tensor:
        """Return how often each token counts, ``[N, B]`` int32: once, or not at all outside the range."""
        times_NB = torch.ones_like(self.token_NB, dtype=torch.int32)
        times_NB[self.edge_F] = self.asked_FB.int()
        return times_NB


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Tokens that are not in the slots of their positions: rows (ascending), positions and tokens."""

    row_A: NDArray[np.int64]
    position_A: NDArray[np.int64]
    token_A: NDArray[np.int64]

    @classmethod
    def of(cls, plan: StepPlan) -> Elsewhere | None:
        """Return those of the trees of ``plan``; None without any."""
        found, row = list[tuple[int, int, int]](), sum(state.row.looks_back for state in plan.decodes)
        for chain in plan.chains:
            if not chain.state.row.looks_back:
                continue
            if (tree := chain.tree) is not None:
                found += (
                    (row + draw, chain.start + depth, tree.tokens[node - 1])
                    for draw in range(chain.length)
                    for depth, node in enumerate(tree.path(draw), start=1)
                    if node != depth
                )
            row += chain.length
        return cls(*np.array(found, dtype=np.int64).T.copy()) if found else None

    def among(self, row_P: NDArray[np.int64], place_P: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return places and tokens of those that rows ``row_P`` (ascending) have; ``place_P``: the place of each row's
        position 0."""
        at_A = np.searchsorted(row_P, self.row_A).clip(max=len(row_P) - 1)
        there_A = row_P[at_A] == self.row_A
        return np.stack((place_P[at_A] + self.position_A, self.token_A))[:, there_A]


@dataclass(frozen=True, slots=True)
class History:
    """The earlier tokens of E rows. ``blocks_EM`` may get more blocks later; those that it names stay."""

    token_ids_S: Tensor
    block_size: int
    blocks_EM: Tensor
    elsewhere: Elsewhere | None = None

    def look(self, row_P: NDArray[np.int64], first_P: NDArray[np.int64], end_P: NDArray[np.int64]) -> Tokens:
        """Return the tokens of rows ``row_P`` at the positions ``first_P .. end_P``, at least one for each row."""
        size, device = self.block_size, self.blocks_EM.device
        column_P = first_P // size
        count_P = -(-end_P // size) - column_P
        assert (column_P + count_P).max() <= self.blocks_EM.shape[1], "a row is longer than its blocks"
        start_P = count_P.cumsum() - count_P
        shift_P = row_P * self.blocks_EM.shape[1] + column_P - start_P
        count, shift = upload(np.stack((count_P, shift_P)), device)
        row_N = torch.repeat_interleave(count, output_size=int(count_P.sum()))
        at_N = torch.arange(len(row_N), device=device).add_(shift.index_select(0, row_N))
        block_N = self.blocks_EM.view(-1).index_select(0, at_N)
        token_NB = self.token_ids_S.view(-1, size).index_select(0, block_N)
        if self.elsewhere is not None:
            place_A, token_A = upload(self.elsewhere.among(row_P, (start_P - column_P) * size), device)
            token_NB.view(-1).index_copy_(0, place_A, token_A)
        ends_P = start_P + count_P - 1
        edge_F, last_F = upload(
            np.stack((np.concatenate((start_P, ends_P)), np.tile(ends_P * size + (end_P - 1) % size, 2))), device
        )
        begin_2P = np.stack((column_P, column_P + count_P - 1)) * size
        asked_FB = upload(_between(begin_2P, first_P, end_P, size), device)
        token_NB[edge_F] = torch.where(asked_FB, token_NB[edge_F], token_NB.view(-1)[last_F][:, None])
        return Tokens(row_N, token_NB, edge_F, asked_FB)


def _between(
    begin_2P: NDArray[np.int64], first_P: NDArray[np.int64], end_P: NDArray[np.int64], size: int
) -> NDArray[np.bool_]:
    """Return which of the ``size`` positions from ``begin_2P`` on lie in ``first_P .. end_P``, ``[2 P, size]``."""
    position_2PB = begin_2P[..., None] + np.arange(size)
    return ((position_2PB >= first_P[:, None]) & (position_2PB < end_P[:, None])).reshape(-1, size)


class Histories:
    """Histories of one engine's sequences, read from the slots of ``kv``."""

    def __init__(self, kv: KVCache) -> None:
        self._token_ids_S, self._block_size = kv.token_ids_S, kv.block_size
        self._blocks = _BlockRows(kv.token_ids_S.device)

    def of(self, plan: StepPlan) -> History | None:
        """Return the history of the rows of ``plan`` that look back, in their order; None without such rows."""
        blocks_EM = self._blocks.of([state.blocks for state in plan.drawing if state.row.looks_back])
        if not len(blocks_EM):
            return None
        return History(self._token_ids_S, self._block_size, blocks_EM, Elsewhere.of(plan))


class _BlockRows:
    """Lists of blocks as a tensor that is kept from step to step, so that a block is uploaded once.

    A sequence's list only grows from its admission to its end; when it is admitted again it has another list.
    """

    def __init__(self, device: torch.device) -> None:
        self._lists: Sequence[Sequence[int]] = ()
        self._known: list[int] = []
        """How many blocks of each list are in the tensor."""
        self._blocks_EM = torch.zeros((0, _SLACK), dtype=torch.int64, device=device)

    def of(self, lists: Sequence[Sequence[int]]) -> Tensor:
        """Return ``blocks_EM``. A list is known by its identity. Tensors returned earlier keep their contents."""
        if len(lists) != len(self._lists) or any(
            one is not other for one, other in zip(lists, self._lists, strict=True)
        ):
            self._adopt(lists)
        grown = [row for row, blocks in enumerate(lists) if len(blocks) > self._known[row]]
        if grown:
            self._extend(grown)
        return self._blocks_EM

    def _adopt(self, lists: Sequence[Sequence[int]]) -> None:
        """Move the rows of lists that stayed, on the device. Nothing is known of the other rows."""
        before = {id(blocks): row for row, blocks in enumerate(self._lists)}
        moved = [(row, before[id(blocks)]) for row, blocks in enumerate(lists) if id(blocks) in before]
        known_before, old_EM = self._known, self._blocks_EM
        width = max((len(blocks) for blocks in lists), default=0) + _SLACK  # narrower again, when a long one has gone
        self._lists, self._known = tuple(lists), [0] * len(lists)
        self._blocks_EM = old_EM.new_zeros((len(lists), width))
        if moved:
            to, at = upload(np.array(moved).T.copy(), old_EM.device)
            shared = min(width, old_EM.shape[1])
            self._blocks_EM[to, :shared] = old_EM[at, :shared]
        for row, old in moved:
            self._known[row] = known_before[old]

    def _extend(self, grown: Sequence[int]) -> None:
        longest, width = max(len(self._lists[row]) for row in grown), self._blocks_EM.shape[1]
        if longest > width:
            self._blocks_EM = torch.nn.functional.pad(self._blocks_EM, (0, longest + _SLACK - width))
        parts = []
        for row in grown:
            blocks, known = self._lists[row], self._known[row]
            new = np.frombuffer(array("q", blocks[known:]), dtype=np.int64)
            parts.append(np.stack((np.full_like(new, row), np.arange(known, len(blocks)), new)))
            self._known[row] = len(blocks)
        row_L, column_L, block_L = upload(np.concatenate(parts, axis=1), self._blocks_EM.device)
        self._blocks_EM[row_L, column_L] = block_L
