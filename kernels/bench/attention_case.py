"""A step of attention with its cache, and what its output should be.

Legend: T rows, S sequences, N query heads, J key heads, H head dimension, P blocks of the cache, B positions per block,
M blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from bench import floors
from bench.bank import DTYPES
from bench.case import checked_rows
from bench.timing import copies_for
from moe_kernels.paged_attention.planner import Planner
from moe_kernels.paged_attention.tiling import tiling_for
from moe_kernels.paged_attention.trees import MOST, TreeRows
from moe_kernels.paged_attention.work import Work

BLOCK: Final = 16
_CPU_MULTIPROCESSORS: Final = 8
_HOPPER: Final = (9, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Heads:
    """Query and key heads of a model's attention."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Lengths:
    """Rows of each sequence in the step, and its positions with them."""

    rows: tuple[int, ...]
    kv_len: tuple[int, ...]

    @property
    def total(self) -> int:
        return sum(self.rows)

    @property
    def pairs(self) -> int:
        """A row and a position that it sees."""
        return sum(rows * length - rows * (rows - 1) // 2 for rows, length in zip(self.rows, self.kv_len, strict=True))


class AttentionCase:
    """Random queries, keys and values. ``tables`` are block tables of as many caches as a measurement rotates over."""

    def __init__(
        self, shape: Heads, lengths: Lengths, dtype: str, device: str, *, seed: int = 0, split: int | None = None,
        window: int | None = None, copies: int | None = None, trees: bool = False,
    ) -> None:  # fmt: skip
        self.shape, self.lengths, self.dtype, self.device, self.window = shape, lengths, dtype, device, window
        self.trees = trees
        self.copies = self._copies() if copies is None else copies
        generator = torch.Generator(device).manual_seed(seed)
        size = shape.kv_heads, shape.head_dim

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=DTYPES[dtype])

        counts = [-(-length // BLOCK) for length in lengths.kv_len]
        self.q_TNH = randn(lengths.total, shape.heads, shape.head_dim)
        self.k_PBJH, self.v_PBJH = (randn(self.copies * sum(counts), BLOCK, *size) for _ in "kv")
        order = torch.randperm(self.copies * sum(counts), generator=torch.Generator().manual_seed(seed))
        own = torch.split(order, counts * self.copies)
        table = torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True).to(device, torch.int32)
        self.tables = table.view(self.copies, len(counts), -1).unbind()
        self.planner = self._planner(split)
        self.work = Work.empty(self.planner, device).fill(self.words(lengths))

    def _copies(self) -> int:
        if self.device == "cpu":
            return 1
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return copies_for(self.read_bytes, self.read_bytes, memory)

    @property
    def read_bytes(self) -> int:
        """Keys and values that a step cannot avoid to read."""
        shape = self.shape
        return 2 * sum(self.lengths.kv_len) * shape.kv_heads * shape.head_dim * DTYPES[self.dtype].itemsize

    @property
    def floor_us(self) -> float:
        """Two products per query head, row and position that it sees."""
        flops = 4.0 * self.lengths.pairs * self.shape.heads * self.shape.head_dim
        return max(floors.memory_us(self.read_bytes), floors.compute_us(flops))

    def words(self, lengths: Lengths) -> Tensor:
        trees = {at: forks(rows) for at, rows in enumerate(lengths.rows) if 1 < rows <= MOST and self.trees}
        return torch.from_numpy(self.planner.plan(lengths.rows, lengths.kv_len, trees))

    def _planner(self, split: int | None) -> Planner:
        shape, lengths, multiprocessors, warpgroups = self.shape, self.lengths, _CPU_MULTIPROCESSORS, True
        if self.device != "cpu":
            multiprocessors = torch.cuda.get_device_properties(self.device).multi_processor_count
            warpgroups = torch.cuda.get_device_capability(self.device) >= _HOPPER
        tiling = tiling_for(
            heads=shape.heads, kv_heads=shape.kv_heads, head_dim=shape.head_dim, itemsize=DTYPES[self.dtype].itemsize,
            multiprocessors=multiprocessors, warpgroups=warpgroups, prompts=max(lengths.rows) > 1,
        )  # fmt: skip
        return Planner(
            tiling, rows=lengths.total, sequences=len(lengths.rows), positions=max(lengths.kv_len), split=split,
            window=self.window, trees=self.trees,
        )  # fmt: skip

    def contiguous(self, sequence: int) -> tuple[Tensor, Tensor]:
        """``[L, J, H]`` keys and values of a sequence in copy 0."""
        blocks, length = self.tables[0][sequence].long(), self.lengths.kv_len[sequence]
        blocks = blocks[: -(-length // BLOCK)]
        k, v = (cache[blocks].flatten(0, 1)[:length] for cache in (self.k_PBJH, self.v_PBJH))
        return k, v

    def deviation(self, out_TNH: Tensor) -> float:
        """Norm of the difference to float32 over its norm, on some rows of copy 0; NaN if anything is NaN."""
        if not bool(torch.isfinite(out_TNH).all()):
            return float("nan")
        rows = checked_rows(self.lengths.total)
        expected = torch.stack([self._row(row) for row in rows])
        return float((out_TNH[rows].float() - expected).norm() / expected.norm().clamp_min(1e-30))

    def _row(self, row: int) -> Tensor:
        sequence, inside = 0, row
        while inside >= self.lengths.rows[sequence]:
            inside -= self.lengths.rows[sequence]
            sequence += 1
        last = self.lengths.kv_len[sequence] - self.lengths.rows[sequence] + inside
        first = 0 if self.window is None else max(0, last - self.window + 1)
        group = self.shape.heads // self.shape.kv_heads
        k_LNH, v_LNH = (
            each[first : last + 1].float().repeat_interleave(group, 1) for each in self.contiguous(sequence)
        )
        scores_NL = torch.einsum("nh,lnh->nl", self.q_TNH[row].float(), k_LNH) * self.shape.head_dim**-0.5
        return torch.einsum("nl,lnh->nh", scores_NL.softmax(dim=-1), v_LNH)


def forks(rows: int) -> TreeRows:
    """Two branches that part at the first row, alternately."""
    words, depths = [0], [0]
    for row in range(1, rows):
        parent = max(0, row - 2)
        words.append(words[parent] | 1 << (row - 1))
        depths.append(depths[parent] + 1)
    return TreeRows(np.array(depths), np.array(words, dtype=np.uint64))
