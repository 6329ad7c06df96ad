"""Decodes over a cache of latents, and what their output should be.

Legend: S rows, N heads, Z numbers of a latent, C those that are the value, P blocks of the cache, B positions per
block, M blocks of a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from bench import floors
from bench.bank import DTYPES
from bench.case import checked_rows
from bench.timing import copies_for
from moe_kernels.paged_latent.op import paged_latent

BLOCK: Final = 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Latents:
    """Heads of a model's multi-head latent attention."""

    name: str
    heads: int
    size: int = 576
    rank: int = 512


class LatentCase:
    """Random queries and latents. ``tables`` are block tables of as many caches as a measurement rotates over."""

    def __init__(
        self, shape: Latents, lengths: tuple[int, ...], dtype: str, device: str, *, seed: int = 0,
        copies: int | None = None,
    ) -> None:  # fmt: skip
        self.shape, self.lengths, self.dtype, self.device = shape, lengths, dtype, device
        self.copies = self._copies() if copies is None else copies
        generator = torch.Generator(device).manual_seed(seed)

        def randn(*sizes: int) -> Tensor:
            return torch.randn(*sizes, generator=generator, device=device, dtype=DTYPES[dtype])

        counts = [-(-length // BLOCK) for length in lengths]
        self.q_SNZ = randn(len(lengths), shape.heads, shape.size)
        self.latents_PBZ = randn(self.copies * sum(counts), BLOCK, shape.size)
        order = torch.randperm(self.copies * sum(counts), generator=torch.Generator().manual_seed(seed))
        own = torch.split(order, counts * self.copies)
        table = torch.nn.utils.rnn.pad_sequence(list(own), batch_first=True).to(device, torch.int32)
        self.tables = table.view(self.copies, len(counts), -1).unbind()
        self.kv_len_S = torch.tensor(lengths, dtype=torch.int32, device=device)

    def __call__(self, number: int = 0) -> Tensor:
        table_SM, shape = self.tables[number % self.copies], self.shape
        return paged_latent(
            self.q_SNZ, self.latents_PBZ, table_SM, self.kv_len_S, rank=shape.rank, scale=shape.size**-0.5
        )

    def _copies(self) -> int:
        if self.device == "cpu":
            return 1
        memory = torch.cuda.get_device_properties(self.device).total_memory
        return copies_for(self.read_bytes, self.read_bytes, memory)

    @property
    def read_bytes(self) -> int:
        """Latents that a step cannot avoid to read: each once, whatever the number of heads."""
        return sum(self.lengths) * self.shape.size * DTYPES[self.dtype].itemsize

    @property
    def flops(self) -> float:
        """Two products per head and position, of Z numbers and of C."""
        return 2.0 * sum(self.lengths) * self.shape.heads * (self.shape.size + self.shape.rank)

    @property
    def floor_us(self) -> float:
        return max(floors.memory_us(self.read_bytes), floors.compute_us(self.flops))

    def contiguous(self, row: int) -> Tensor:
        """``[L, Z]``, the latents of a row in copy 0."""
        blocks = self.tables[0][row].long()[: -(-self.lengths[row] // BLOCK)]
        return self.latents_PBZ[blocks].flatten(0, 1)[: self.lengths[row]]

    def deviation(self, out_SNC: Tensor) -> float:
        """Norm of the difference to float32 over its norm, on some rows of copy 0; NaN if anything is NaN."""
        if not bool(torch.isfinite(out_SNC).all()):
            return float("nan")
        rows = checked_rows(len(self.lengths))
        expected = torch.stack([self._row(row) for row in rows])
        return float((out_SNC[rows].float() - expected).norm() / expected.norm().clamp_min(1e-30))

    def _row(self, row: int) -> Tensor:
        seen_LZ = self.contiguous(row).float()
        scores_NL = self.q_SNZ[row].float() @ seen_LZ.T * self.shape.size**-0.5
        expected_NC: Tensor = scores_NL.softmax(dim=-1) @ seen_LZ[:, : self.shape.rank]
        return expected_NC
