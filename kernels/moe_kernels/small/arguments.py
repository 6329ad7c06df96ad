"""What the launches of the small-T layer are given: weights, pairs and lists as kernel arguments.

Legend: S pairs (token, slot), E experts, C candidates, B column blocks, O and I a matrix's output and input columns.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from moe_kernels import backend
from moe_kernels.quant.weight import QuantisedWeight, kind_flags

MAX_PAIRS = 2048
"""A program holds all pairs' experts in registers: 16 per thread at most."""
MIN_BLOCK = 64
"""Fewer pairs or column blocks share one compiled kernel."""
MAX_BY_PAIR = 512
"""``small_in_kernel`` keeps counts of pairs in 10 bits if candidates are pairs."""
INT4_RUN = 128
WORD_RUN = 64
"""Input columns of int8 weights that four threads unpack together, and of the order that activations take for it."""
WORDS_WIDE = 16
TMA_ALIGNMENT = 16
"""Bytes that TMA wants a matrix's address and row stride to be a multiple of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Matrices:
    """``stored``: ``[E, O, I]``, or ``[E, O, about I / 2]`` at 4 bits. ``group``: columns per scale, 0: one a row.
    ``mixed``: not of the kinds that have a way of their own through the kernels; ``wordy``: small floats that have one
    if they are unpacked by words.
    """

    stored: Tensor
    scales: Tensor | None
    zeros: Tensor | None
    bits: int
    columns: int
    mixed: bool
    wordy: bool
    kind: Mapping[str, Any]

    @property
    def group(self) -> int:
        return int(self.kind["GROUP"])


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairs:
    """What the kernels need to know about the router's choice. ``known``: entries of the table of local experts."""

    ids: Tensor
    weights: Tensor
    keep: Tensor | None
    local: Tensor | None
    tokens: int
    slots: int
    known: int
    experts: int

    @property
    def count(self) -> int:
        return self.tokens * self.slots

    @property
    def by_pair(self) -> bool:
        """Fewer pairs than experts: a program that looks for its expert's first pair is idle less often."""
        return self.count <= min(self.experts, MAX_BY_PAIR)

    @property
    def candidates(self) -> int:
        return self.count if self.by_pair else self.experts

    def arguments(self) -> dict[str, Any]:
        return {
            "ids": self.ids, "local": self.local if self.local is not None else self.ids,
            "keep": self.keep if self.keep is not None else self.ids,
            "S": self.count, "IDS": self.known, "E": self.experts, "SLOTS": self.slots,
            "HAS_LOCAL": self.local is not None, "HAS_KEEP": self.keep is not None,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class Lists:
    """What the first launch leaves for the second: ``small_in_kernel`` says what is in them."""

    order_S: Tensor
    first_C: Tensor
    count_C: Tensor
    total_1: Tensor
    arrived_B: Tensor

    def arguments(self) -> dict[str, Tensor]:
        return {name: getattr(self, name) for name in self.__slots__}


def weight_arguments(w: Matrices, width: int, depth: int, x: Tensor, tiles: Mapping[str, int]) -> dict[str, Any]:
    """Of a launch that multiplies by ``w``: blocks of ``width`` output columns, sums over ``depth`` input columns."""
    block_n, block_k = tiles["BLOCK_N"], _block_k(w, tiles)
    words = in_words(w, x, tiles)
    stored = w.stored.view(torch.int32) if words else w.stored
    rows, columns = stored.shape[0] * stored.shape[1], stored.shape[2]
    aligned = columns * stored.element_size() % TMA_ALIGNMENT == 0 and stored.data_ptr() % TMA_ALIGNMENT == 0
    tma = bool(tiles.get("TMA")) and aligned
    block = [block_n, WORDS_WIDE if words else INT4_RUN // 2 if w.bits == 4 else block_k]
    paired = words and w.kind["CODES"] == "e2m1"
    scales = w.scales.view(torch.int16) if paired and w.scales is not None else w.scales
    return {
        "w": TensorDescriptor(stored, [rows, columns], [columns, 1], block) if tma else stored,
        "scales": scales if scales is not None else x, "zeros": w.zeros if w.zeros is not None else x,
        "G": scales.shape[2] if scales is not None else 1, "MIXED": w.mixed and not words, **w.kind,
        "magic": 0x64006400 if x.dtype == torch.float16 else 0x43004300, "BITS": w.bits,
        "WORDS": words, "WARPS": tiles["num_warps"], "TMA": tma, "EVEN_N": width % block_n == 0,
        "EVEN_K": depth % block_k == 0, "EVICT_FIRST": bool(tiles.get("EVICT_FIRST")),
        "UPCAST": backend.upcast(x.dtype), "PRECISION": "ieee" if x.dtype == torch.float32 else "tf32",
        "PDL": bool(tiles.get("PDL")), "STAGES": tiles["num_stages"], "BLOCK_N": block_n, "BLOCK_M": tiles["BLOCK_M"],
        "BLOCK_K": block_k,
    }  # fmt: skip


def _block_k(w: Matrices, tiles: Mapping[str, int]) -> int:
    """Input columns per step: whole runs of int4, within one group of int8."""
    if w.bits == 4:
        return max(tiles["BLOCK_K"], INT4_RUN)
    return min(tiles["BLOCK_K"], w.group) if w.bits == 8 and w.group else tiles["BLOCK_K"]


def in_words(w: Matrices, x: Tensor, tiles: Mapping[str, int]) -> bool:
    """Whether quantised weights can be unpacked by words: half types, whole runs, whole warps, aligned rows."""
    runs = w.columns % WORD_RUN == 0 and _block_k(w, tiles) % WORD_RUN == 0
    warps = tiles["num_warps"] % 4 == 0 and tiles["BLOCK_N"] % (16 * tiles["num_warps"]) == 0
    aligned = w.stored.data_ptr() % TMA_ALIGNMENT == 0
    known = x.dtype == torch.bfloat16 if w.wordy else not w.mixed and x.dtype != torch.float32
    return w.bits < 16 and known and runs and warps and aligned


def launch_options(w: Matrices, tiles: Mapping[str, int]) -> dict[str, Any]:
    """A bound on registers was tuned for integers with a way of their own; others would spill."""
    options: dict[str, Any] = {"num_warps": tiles["num_warps"], "num_stages": tiles["num_stages"]}
    if tiles.get("MAX_REGISTERS") and not w.mixed:
        options["maxnreg"] = tiles["MAX_REGISTERS"]
    return options | launch_pdl(bool(tiles.get("PDL")))


def launch_pdl(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}


def block_s(pairs: Pairs) -> int:
    return int(max(MIN_BLOCK, triton.next_power_of_2(pairs.count)))


def block_c(lists: Lists) -> int:
    return int(max(MIN_BLOCK, triton.next_power_of_2(lists.arrived_B.numel())))


def matrices(w: Tensor | QuantisedWeight) -> Matrices:
    if isinstance(w, Tensor):
        return Matrices(
            stored=w, scales=None, zeros=None, bits=16, columns=w.shape[2], mixed=False, wordy=False, kind=kind_flags(w)
        )
    return Matrices(
        stored=w.packed, scales=w.scales, zeros=w.zeros, bits=w.bits, columns=w.in_features, mixed=not w.plain,
        wordy=_wordy(w), kind=kind_flags(w),
    )  # fmt: skip


def _wordy(w: QuantisedWeight) -> bool:
    """FP8 with a scale for each 128 columns, and MXFP4 whose rows have an even number of groups."""
    if w.order is not None or w.in_features % WORD_RUN:
        return False
    if w.codes == "e2m1":
        return w.group == 32 and w.scale_rows == 1 and w.scales.data_ptr() % 2 == 0
    return w.codes == "e4m3" and w.group == INT4_RUN


def make_lists(pairs: Pairs, column_blocks: int, device: torch.device) -> Lists:
    lengths = {
        "order_S": pairs.count, "first_C": pairs.candidates, "count_C": pairs.candidates, "total_1": 1,
        "arrived_B": column_blocks,
    }  # fmt: skip
    # Each list starts at a multiple of 16 bytes: triton compiles a kernel again for pointers that do not.
    ends = list(accumulate(triton.cdiv(length, 4) * 4 for length in lengths.values()))
    space = torch.empty(ends[-1], dtype=torch.int32, device=device)
    starts = zip([0, *ends], lengths.items(), strict=False)
    return Lists(**{name: space[start : start + length] for start, (name, length) in starts})
