"""Attention of decode steps against its definition: blocks in any order, all lengths, windows, sequences in parts."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models.guarded import guarded
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError
from moe_kernels.paged_decode.kernel import cut
from moe_kernels.paged_decode.op import paged_decode

pytestmark = pytest.mark.usefixtures("path")
NO_BLOCK = 1 << 40


class Case:
    """Random queries, keys and values; what no sequence holds is NaN, and no block follows a sequence's last."""

    def __init__(
        self, lengths: list[int], *, heads: int = 2, kv_heads: int = 1, head_dim: int = 16, block_size: int = 16,
        dtype: torch.dtype = torch.float32, seed: int = 0, most_blocks: int = 0,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(seed)
        counts = [-(-length // block_size) for length in lengths]
        most = max(most_blocks, *counts, 1)
        order = (torch.randperm(sum(counts), generator=generator) + 1).tolist()  # block 0 is nobody's
        shape = (len(order) + 1, block_size, kv_heads, head_dim)
        self.k = torch.full(shape, torch.nan, dtype=dtype)
        self.v = torch.full(shape, torch.nan, dtype=dtype)
        self.kv_len = torch.tensor(lengths)
        self.blocks = torch.full((len(lengths), most), NO_BLOCK)
        self.keys, self.values = [], []
        for sequence, length in enumerate(lengths):
            own = [order.pop() for _ in range(counts[sequence])]
            self.blocks[sequence, : len(own)] = torch.tensor(own, dtype=torch.int64)
            k, v = (torch.randn(length, kv_heads, head_dim, generator=generator).to(dtype) for _ in range(2))
            self.keys.append(k)
            self.values.append(v)
            for position in range(length):
                at = own[position // block_size], position % block_size
                self.k[at], self.v[at] = k[position], v[position]
        # As the model hands them in: a slice of rows that hold keys too.
        self.q = torch.randn(len(lengths), heads + kv_heads, head_dim, generator=generator).to(dtype)[:, :heads]

    def __call__(self, window: int | None = None, sinks_N: Tensor | None = None) -> Tensor:
        return paged_decode(self.q, self.k, self.v, self.blocks, self.kv_len, window=window, sinks_N=sinks_N)

    def expected(self, window: int | None = None, sinks_N: Tensor | None = None) -> Tensor:
        """From the definition, float64."""
        out = torch.zeros(self.q.shape, dtype=torch.float64)
        group = self.q.shape[1] // self.k.shape[2]
        for sequence, (k, v) in enumerate(zip(self.keys, self.values, strict=True)):
            first = 0 if window is None else max(0, len(k) - window)
            for head in range(self.q.shape[1] if len(k) else 0):
                scores = k[first:, head // group].double() @ self.q[sequence, head].double() * self.q.shape[2] ** -0.5
                if sinks_N is not None:
                    scores = torch.cat([scores, sinks_N[head].double()[None]])
                out[sequence, head] = scores.softmax(0)[: len(k) - first] @ v[first:, head // group].double()
        return out


@pytest.mark.parametrize("window", [None, 1, 9])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "block_size"),
    [(8, 1, 32, 16), (2, 2, 16, 4), (6, 2, 24, 5), (4, 4, 80, 1), (18, 1, 8, 7)],
)
def test_equals_the_definition(heads: int, kv_heads: int, head_dim: int, block_size: int, window: int | None) -> None:
    case = Case([0, 1, 17, 5], heads=heads, kv_heads=kv_heads, head_dim=head_dim, block_size=block_size)
    assert_close(case(window), case.expected(window))


@pytest.mark.parametrize("window", [None, 9, 200])
@pytest.mark.parametrize("size", [1.0, 300.0], ids=["sinks as large as scores", "sinks that take all, or nothing"])
def test_sinks_take_their_share_once(size: float, window: int | None) -> None:
    """Of sequences in one part and in several, and where no sequence is."""
    case = Case([0, 1, 17, 300, 1030], heads=6, kv_heads=2, most_blocks=80)
    sinks_N = torch.tensor([-1.0, 1.0, 0.0, 0.5, -0.5, 2.0]) * size
    assert_close(case(window, sinks_N), case.expected(window, sinks_N))
    assert_close(case(window, sinks_N.bfloat16()), case.expected(window, sinks_N))
    assert not torch.equal(case(window, sinks_N), case(window))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    case = Case([3, 40], heads=4, kv_heads=2, head_dim=32, block_size=16, dtype=dtype)
    assert case().dtype == dtype
    assert_close(case(), case.expected())


@pytest.mark.parametrize("window", [None, 200])
def test_long_sequences_are_cut(window: int | None) -> None:
    """Into 1, 2, 3 and 8 parts here; the row without a sequence stays empty."""
    case = Case([128, 129, 0, 300, 1030], most_blocks=80)
    assert_close(case(window), case.expected(window))


def test_more_than_the_longest_part_for_each() -> None:
    """Many rows leave few parts for each: those of one very long sequence are then longer than parts should be."""
    case = Case([0] * 31 + [16_500], heads=1, head_dim=4, block_size=1024)
    assert_close(case(), case.expected(), roundings=64)  # a sum of 16,500


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 50), st.integers(0, 99))
def test_any_lengths(lengths: list[int], block_size: int, window: int, seed: int) -> None:
    case = Case(lengths, head_dim=4, block_size=block_size, seed=seed, most_blocks=45)
    assert_close(case(window), case.expected(window))


def test_nothing_is_touched_past_any_tensor() -> None:
    """The last block of the cache is in use; its last place lies before a page that nobody may read."""
    case = Case([7, 13], heads=6, kv_heads=2, head_dim=24, block_size=5, dtype=torch.float16)
    expected = case.expected()
    used = torch.unique(case.blocks[case.blocks != NO_BLOCK])
    moved = torch.full((int(used.max()) + 1,), NO_BLOCK)
    moved[used] = torch.arange(len(used))
    case.blocks = torch.where(case.blocks == NO_BLOCK, NO_BLOCK, moved[case.blocks.clamp(max=int(used.max()))])
    for name in ("q", "blocks", "kv_len"):
        setattr(case, name, guarded(getattr(case, name)))
    case.k, case.v = guarded(case.k[used]), guarded(case.v[used])
    assert_close(case(), expected)


@pytest.mark.parametrize("where", ["k", "v", "q"])
def test_nan_stays_with_its_sequence(where: str) -> None:
    case = Case([150, 150])
    if where == "q":
        case.q[0] = torch.nan
    else:
        getattr(case, where)[case.blocks[0, 0], 3] = torch.nan
    out = case()
    assert out[0].isnan().all()
    assert_close(out[1], case.expected()[1])


def test_a_scale_of_its_own() -> None:
    case = Case([9], heads=1, head_dim=8, block_size=4)
    out = paged_decode(case.q, case.k, case.v, case.blocks, case.kv_len, scale=0.0)
    assert_close(out[0, 0], case.values[0][:, 0].double().mean(0))


def test_the_worked_example() -> None:
    one = torch.tensor([[1]])
    v = torch.tensor([2.0, 4.0]).view(1, 2, 1, 1)
    arguments = torch.zeros(1, 1, 1), torch.ones(1, 2, 1, 1), v, one - 1, one[0] + 1
    assert paged_decode(*arguments, scale=1.0).tolist() == [[[3.0]]]
    assert paged_decode(*arguments, scale=1.0, window=1).tolist() == [[[4.0]]]
    assert paged_decode(*arguments, scale=1.0, sinks_N=torch.zeros(1)).tolist() == [[[2.0]]]


def test_no_rows_no_output() -> None:
    case = Case([1], head_dim=8, block_size=4)
    assert paged_decode(case.q[:0], case.k, case.v, case.blocks[:0], case.kv_len[:0]).shape == (0, 2, 8)


@pytest.mark.parametrize(("programs", "most"), [(1, 1), (4, 40_960), (32, 40_960), (1024, 40_960), (8, 300)])
def test_every_length_has_room_in_the_grid(programs: int, most: int) -> None:
    wanted, parts = cut(programs, most, 132)
    assert 1 <= wanted <= parts <= 64
    assert programs * wanted >= min(4 * 132, programs * parts) or wanted == -(-most // 128)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"q": torch.zeros(1, 8)}, r"q must be \[S, N, H\]"),
        ({"q": torch.zeros(1, 3, 8)}, "3 query heads do not divide into 2"),
        ({"q": torch.zeros(1, 2, 8, dtype=torch.float64)}, "q must be"),
        ({"q": torch.zeros(1, 2, 16)}, r"k must be \[P, B, J, 16\]"),
        ({"k": torch.zeros(8, 2, 4, 1).permute(3, 2, 1, 0)}, "contiguous"),
        ({"v": torch.zeros(1, 4, 2, 8, dtype=torch.float16)}, "k and v must be alike"),
        ({"blocks": torch.zeros(2, 1, dtype=torch.int64)}, r"blocks \[S, M\]"),
        ({"kv_len": torch.zeros(1)}, r"kv_len \[S\]"),
        ({"window": 0}, "window must be at least 1"),
        ({"sinks_N": torch.zeros(3)}, r"sinks must be \[2\]"),
        ({"sinks_N": torch.zeros(2, dtype=torch.int64)}, r"sinks must be \[2\]"),
        ({"sinks_N": [0.0, 0.0]}, "sinks"),
        ({"q": torch.zeros(1, 2, 8, requires_grad=True)}, "no backward pass"),
    ],
)
def test_bad_arguments(change: dict[str, object], words: str) -> None:
    given = {
        "q": torch.zeros(1, 2, 8), "k": torch.zeros(1, 4, 2, 8), "v": torch.zeros(1, 4, 2, 8),
        "blocks": torch.zeros(1, 1, dtype=torch.int64), "kv_len": torch.ones(1, dtype=torch.int64),
        "window": None, "sinks_N": None,
    } | change  # fmt: skip
    options = {name: given.pop(name) for name in ("window", "sinks_N")}
    with pytest.raises(ArgumentError, match=words):
        paged_decode(*given.values(), **options)  # type: ignore[arg-type]
