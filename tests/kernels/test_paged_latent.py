"""paged_latent against its definition in float64: torch's way and the interpreted kernel."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.guarded import guarded
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError
from moe_kernels.paged_latent.op import paged_latent

pytestmark = pytest.mark.usefixtures("path")
NO_BLOCK = 1 << 40


class Case:
    """Random queries and latents; what no row sees is NaN, and no block follows a sequence's last."""

    def __init__(
        self, lengths: list[int], *, heads: int = 3, size: int = 20, rank: int = 16, block_size: int = 16,
        dtype: torch.dtype = torch.float32, seed: int = 0, most_blocks: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for length in lengths]
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()  # block 0 is nobody's
        self.latents = torch.full((len(order) + 1, block_size, size), torch.nan, dtype=dtype)
        self.kv_len = torch.tensor(lengths)
        self.blocks = torch.full((len(lengths), max(most_blocks, *counts, 1)), NO_BLOCK)
        self.rank, self.scale, self.seen = rank, size**-0.5, []
        for row, length in enumerate(lengths):
            own = [order.pop() for _ in range(counts[row])]
            self.blocks[row, : len(own)] = torch.tensor(own, dtype=torch.int64)
            self.seen.append(torch.randn(length, size, generator=generator).to(dtype))
            for position in range(length):
                self.latents[own[position // block_size], position % block_size] = self.seen[-1][position]
        self.q = torch.randn(len(lengths), heads, size, generator=generator).to(dtype)

    def __call__(self) -> Tensor:
        return paged_latent(self.q, self.latents, self.blocks, self.kv_len, rank=self.rank, scale=self.scale)

    def expected(self) -> Tensor:
        """From the definition, float64."""
        out = torch.zeros(*self.q.shape[:2], self.rank, dtype=torch.float64)
        for row, seen_LZ in enumerate(self.seen):
            if len(seen_LZ):
                scores_NL = self.q[row].double() @ seen_LZ.double().T * self.scale
                out[row] = scores_NL.softmax(1) @ seen_LZ[:, : self.rank].double()
        return out


@pytest.mark.parametrize(
    ("heads", "size", "rank", "block_size"),
    [(4, 36, 26, 5), (1, 17, 16, 16), (70, 40, 32, 4), (3, 8, 8, 7), (16, 96, 64, 1), (2, 576, 512, 64)],
)
def test_equals_the_definition(heads: int, size: int, rank: int, block_size: int) -> None:
    case = Case([0, 1, 17, 5, 70], heads=heads, size=size, rank=rank, block_size=block_size)
    assert_close(case(), case.expected())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case([3, 40], heads=5, size=48, rank=32, dtype=dtype)
    assert case().dtype == dtype
    assert_close(case(), case.expected())


def test_long_sequences_are_cut() -> None:
    """Into 1, 2, 3 and 8 parts here; the row without a sequence stays empty."""
    case = Case([128, 129, 0, 300, 1030], most_blocks=80)
    assert_close(case(), case.expected())


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 12), st.integers(0, 99))
def test_any_lengths(lengths: list[int], block_size: int, rank: int, seed: int) -> None:
    case = Case(lengths, size=12, rank=rank, block_size=block_size, seed=seed, most_blocks=45)
    assert_close(case(), case.expected())


def test_nothing_is_touched_past_any_tensor() -> None:
    """The last block of the cache is in use; its last place lies before a page that nobody may read."""
    case = Case([7, 13], heads=6, size=36, rank=26, block_size=5, dtype=torch.float16)
    expected = case.expected()
    used = torch.unique(case.blocks[case.blocks != NO_BLOCK])
    moved = torch.full((int(used.max()) + 1,), NO_BLOCK)
    moved[used] = torch.arange(len(used))
    case.blocks = torch.where(case.blocks == NO_BLOCK, NO_BLOCK, moved[case.blocks.clamp(max=int(used.max()))])
    for name in ("q", "blocks", "kv_len"):
        setattr(case, name, guarded(getattr(case, name)))
    case.latents = guarded(case.latents[used])
    assert_close(case(), expected)


@pytest.mark.parametrize("where", ["latents", "q"])
def test_nan_stays_with_its_row(where: str) -> None:
    case = Case([150, 150])
    if where == "q":
        case.q[0] = torch.nan
    else:
        case.latents[case.blocks[0, 0], 3] = torch.nan
    out = case()
    assert out[0].isnan().all()
    assert_close(out[1], case.expected()[1])


def test_rows_may_share_a_sequence() -> None:
    """As rows of a piece do, each of which sees one position more."""
    case = Case([9, 9], block_size=4)
    case.blocks[0], case.kv_len[0], case.seen[0] = case.blocks[1], 8, case.seen[1][:8]
    assert_close(case(), case.expected())


def test_the_worked_example() -> None:
    q, latents = torch.tensor([[[0.0, 1.0]]]), torch.tensor([[[2.0, 0.0], [4.0, math.log(3)]]])
    out = paged_latent(q, latents, torch.tensor([[0]]), torch.tensor([2]), rank=1, scale=1.0)
    torch.testing.assert_close(out, torch.tensor([[[3.5]]]))


def test_no_rows_no_output() -> None:
    case = Case([1])
    case.q, case.blocks, case.kv_len = case.q[:0], case.blocks[:0], case.kv_len[:0]
    assert case().shape == (0, 3, 16)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(1, 8)}, r"q must be \[S, N, Z\]"),
        ({"q": torch.zeros(1, 2, 8, dtype=torch.float64)}, "q must be"),
        ({"q": torch.zeros(1, 8, 2).transpose(1, 2)}, "contiguous"),
        ({"q": torch.zeros(1, 2, 577)}, r"of 1\.\.576"),
        ({"q": torch.zeros(1, 2, 16)}, r"latents must be \[P, B, 16\]"),
        ({"latents": torch.zeros(1, 4, 1, 8)}, "latents must be"),
        ({"latents": torch.zeros(1, 8, 4).transpose(1, 2)}, "contiguous"),
        ({"blocks": torch.zeros(2, 1, dtype=torch.int64)}, r"blocks \[S, M\]"),
        ({"kv_len": torch.zeros(1)}, r"kv_len \[S\]"),
        ({"rank": 9}, "rank must be at most 8, found 9"),
        ({"rank": 0}, "rank must be at least 1"),
        ({"q": torch.zeros(1, 2, 8, requires_grad=True)}, "no backward pass"),
    ],
)
def test_bad_arguments(change: dict[str, object], words: str) -> None:
    given = {
        "q": torch.zeros(1, 2, 8), "latents": torch.zeros(1, 4, 8), "blocks": torch.zeros(1, 1, dtype=torch.int64),
        "kv_len": torch.ones(1, dtype=torch.int64), "rank": 6,
    } | change  # fmt: skip
    rank = given.pop("rank")
    with pytest.raises(ArgumentError, match=words):
        paged_latent(*given.values(), rank=rank, scale=1.0)  # type: ignore[arg-type]
