"""Steps of random sequences for ``paged_attention``, and what should come out of them by the definition, in float64.

What no row of a step may read is NaN: blocks that nobody has, places behind a sequence's end, positions before the
window of its first row.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_kernels.paged_attention.op import paged_attention
from moe_kernels.paged_attention.planner import Planner
from moe_kernels.paged_attention.tiling import Tiling, tiling_for
from moe_kernels.paged_attention.trees import TreeRows
from moe_kernels.paged_attention.work import Work

NO_BLOCK = 1 << 40


def small_tiling(heads: int, kv_heads: int, head_dim: int, *, prompts: bool = True, programs: int = 3) -> Tiling:
    """Tiles of 16 positions, narrow ones of 16 lines and wide ones of 32, so that short sequences fill several."""
    whole = tiling_for(
        heads=heads, kv_heads=kv_heads, head_dim=head_dim, itemsize=4, multiprocessors=1, prompts=prompts
    )
    return replace(whole, length=16, programs=programs)


Parents = Sequence[int]
"""Of each row of a sequence but the first, the row that it follows."""


def random_parents(rows: int, seed: int) -> list[int]:
    """Of a tree whose rows follow any earlier one, often the last."""
    draw = random.Random(seed)
    return [row if draw.random() < 0.6 else draw.randrange(row + 1) for row in range(rows - 1)]


def ways(parents: Parents) -> list[list[int]]:
    """Of each row those on the way to it from the first, and itself."""
    found = [[0]]
    for row, parent in enumerate(parents, start=1):
        found.append([*found[parent], row])
    return found


def tree_rows(parents: Parents) -> TreeRows:
    words = [sum(1 << (row - 1) for row in way[1:]) for way in ways(parents)]
    depths = [len(way) - 1 for way in ways(parents)]
    return TreeRows(np.array(depths), np.array(words, dtype=np.uint64))


class Step:
    """``sequences``: rows of this step and positions with them, of each. ``seeds``: of each, one seed one sequence,
    whatever else is in the step. ``spare``: as many rows at the end are of no sequence. There is room for 8 sequences
    at least. ``trees``: of each sequence whose rows branch; None: the list has no room for such."""

    def __init__(
        self, sequences: Sequence[tuple[int, int]], *, heads: int = 2, kv_heads: int = 1, head_dim: int = 16,
        block: int = 16, window: int | None = None, softcap: float | None = None, sinks: bool = False,
        dtype: torch.dtype = torch.float32, seeds: Sequence[int] | None = None, spare: int = 0,
        tiling: Tiling | None = None, split: int | None = None, positions: int | None = None,
        trees: Mapping[int, Parents] | None = None,
    ) -> None:  # fmt: skip
        self.rows, self.kv_len = [rows for rows, _ in sequences], [length for _, length in sequences]
        self.window, self.softcap, self.trees = window, softcap, trees or MappingProxyType({})
        generators = [torch.Generator().manual_seed(seed) for seed in seeds or range(len(sequences))]
        shape = kv_heads, head_dim
        self.keys, self.values = (
            [
                torch.randn(length, *shape, generator=each).to(dtype)
                for each, length in zip(generators, self.kv_len, strict=True)
            ]
            for _ in "kv"
        )  # fmt: skip
        queries = [
            torch.randn(rows, heads + kv_heads, head_dim, generator=each).to(dtype)
            for each, rows in zip(generators, self.rows, strict=True)
        ]
        queries.append(torch.full((spare, heads + kv_heads, head_dim), torch.nan, dtype=dtype))
        self.q = torch.cat(queries)[:, :heads]  # as the model hands them in: a slice of rows that hold keys too
        self.sinks = torch.linspace(-1, 3, heads) if sinks else None
        longest = positions or max([1, *self.kv_len])
        self.planner = Planner(
            tiling or small_tiling(heads, kv_heads, head_dim), rows=len(self.q), sequences=max(8, len(sequences)),
            positions=longest, window=window, split=split, trees=trees is not None,
        )  # fmt: skip
        self._cache(block, -(-longest // block), dtype)
        self.work = Work.empty(self.planner, "cpu").fill(self.words())

    def _cache(self, block: int, most: int, dtype: torch.dtype) -> None:
        counts = [-(-length // block) for length in self.kv_len]
        order = (torch.randperm(sum(counts), generator=torch.Generator().manual_seed(0)) + 1).tolist()
        head = self.keys[0].shape[1:] if self.keys else (self.planner.tiling.kv_heads, self.planner.tiling.head_dim)
        self.k, self.v = (torch.full((len(order) + 1, block, *head), torch.nan, dtype=dtype) for _ in "kv")
        self.blocks = torch.full((self.planner.room.sequences, most), NO_BLOCK)
        for sequence, count in enumerate(counts):
            own = torch.tensor([order.pop() for _ in range(count)], dtype=torch.int64)
            oldest = self.oldest(sequence)
            self.blocks[sequence, oldest // block : count] = own[oldest // block :]
            at = torch.arange(oldest, self.kv_len[sequence])
            for cache, values in ((self.k, self.keys), (self.v, self.values)):
                cache[own[at // block], at % block] = values[sequence][oldest:]

    def oldest(self, sequence: int) -> int:
        """The first position that a row of this step sees."""
        first = self.kv_len[sequence] - self.rows[sequence]
        return min(self.kv_len[sequence], 0 if self.window is None else max(0, first - self.window + 1))

    def words(self) -> Tensor:
        trees = {sequence: tree_rows(parents) for sequence, parents in self.trees.items()}
        return torch.from_numpy(self.planner.plan(self.rows, self.kv_len, trees))

    def __call__(self, **options: Any) -> Tensor:
        given = {"softcap": self.softcap, "sinks_N": self.sinks, **options}
        return paged_attention(self.q, self.k, self.v, self.blocks, self.work, **given)

    def of(self, sequence: int, out_TNH: Tensor) -> Tensor:
        first = sum(self.rows[:sequence])
        return out_TNH[first : first + self.rows[sequence]]

    def expected(self) -> Tensor:
        out_TNH = torch.zeros(self.q.shape, dtype=torch.float64)
        for sequence in range(len(self.rows)):
            self.of(sequence, out_TNH).copy_(self._expected(sequence))
        return out_TNH

    def _expected(self, sequence: int) -> Tensor:
        q_NRH = self.of(sequence, self.q).double().transpose(0, 1)
        heads, rows, head_dim = q_NRH.shape
        group = heads // self.planner.tiling.kv_heads
        k_NLH, v_NLH = (
            each[sequence].double().transpose(0, 1).repeat_interleave(group, 0) for each in (self.keys, self.values)
        )
        scores_NRL = q_NRH @ k_NLH.mT * head_dim**-0.5
        if self.softcap is not None:
            scores_NRL = self.softcap * (scores_NRL / self.softcap).tanh()
        at_L = torch.arange(self.kv_len[sequence])
        at_R1 = at_L[len(at_L) - rows :, None]
        window = len(at_L) if self.window is None else self.window
        seen_RL = (at_L <= at_R1) & (at_L > at_R1 - window)
        if sequence in self.trees:
            seen_RL = self._seen(sequence, window)
        weights_NRL = scores_NRL.exp() * seen_RL
        whole_NR1 = weights_NRL.sum(2, keepdim=True)
        if self.sinks is not None:
            whole_NR1 = whole_NR1 + self.sinks.double().exp()[:, None, None]
        return (weights_NRL / whole_NR1 @ v_NLH).transpose(0, 1)

    def _seen(self, sequence: int, window: int) -> Tensor:
        """Row by row, place by place."""
        rows, length = self.rows[sequence], self.kv_len[sequence]
        seen_RL = torch.zeros(rows, length, dtype=torch.bool)
        for row, way in enumerate(ways(self.trees[sequence])):
            places = [*range(length - rows), *(length - rows + at for at in way)]
            seen_RL[row, places[-window:]] = True
        return seen_RL
