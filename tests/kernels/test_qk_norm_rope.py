"""From the fused projection to attention: norms, clamps, rotation and the cache, against the definition, float64."""

from __future__ import annotations

from typing import Any, Literal

import pytest
import torch
from testkit.models.guarded import guarded
from testkit.models.tolerances import assert_close
from torch import Tensor

from moe_kernels import ArgumentError, backend
from moe_kernels.qk_norm_rope.op import qk_norm_rope_write

both_paths = pytest.mark.usefixtures("path")
EPS = 1e-6
Norm = Literal["head", "projection"]
NORMS: list[Norm | None] = [None, "head", "projection"]


class Case:
    """A random projection and cache; slots in no order, and more of them than rows."""

    def __init__(
        self, rows: int, heads: int, kv_heads: int, size: int, *, norm: Norm | None = "head", clip: float | None = None,
        dtype: torch.dtype = torch.float32, cache_dtype: torch.dtype | None = None, block: int = 4,
        rotated: int | None = None, interleaved: bool = False,
    ) -> None:  # fmt: skip
        generator = torch.Generator().manual_seed(rows + heads + size)
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.heads, self.kv_heads, self.size, self.clip = heads, kv_heads, size, clip
        self.norm: Norm = norm or "head"
        self.weight = None if norm is None else draw(heads + kv_heads, size).to(dtype)
        # As a product may leave it: each row with something behind it.
        self.qkv = draw(rows, (heads + 2 * kv_heads) * size + 3).to(dtype)[:, :-3]
        self.interleaved = interleaved
        angles = draw(rows, (size if rotated is None else rotated) // 2) * 100
        self.cos = torch.cat((angles.cos(), angles.cos()), dim=1).unsqueeze(1)
        self.sin = torch.cat((-angles.sin(), angles.sin()), dim=1).unsqueeze(1)
        blocks = rows // block + 2
        self.slots = torch.randperm(blocks * block, generator=generator)[:rows]
        self.k, self.v = (
            torch.full((blocks, block, kv_heads, size), -7.0, dtype=cache_dtype or dtype) for _ in range(2)
        )

    def __call__(self, *, kv: bool = False, **change: Any) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        given: dict[str, Any] = {
            "qkv_TO": self.qkv, "cos_T1R": self.cos, "sin_T1R": self.sin, "k_PBJH": self.k, "v_PBJH": self.v,
            "slots_T": self.slots, "norm": self.norm, "weight_CH": self.weight, "eps": EPS, "clip": self.clip, "kv": kv,
            "interleaved": self.interleaved,
        }  # fmt: skip
        return qk_norm_rope_write(**given | change)

    def expected(self) -> tuple[Tensor, Tensor, Tensor]:
        """q, k and v of the rows, without roundings."""
        exact = self.qkv.double().view(len(self.qkv), -1, self.size)
        kinds = list(exact.split_with_sizes((self.heads, self.kv_heads, self.kv_heads), dim=1))
        weights = [None, None, None]
        if self.weight is not None:
            weights[:2] = self.weight.double().split_with_sizes((self.heads, self.kv_heads))
        limit = torch.inf if self.clip is None else self.clip
        for at, (kind, weight) in enumerate(zip(kinds, weights, strict=True)):
            if weight is not None and self.norm == "projection":
                kind = _normed(kind, (1, 2)) * weight
            kind = kind.clamp(-limit, limit)
            if weight is not None and self.norm == "head":
                kind = _normed(kind, (2,)) * weight
            kinds[at] = kind
        turned = _neighbours_turned if self.interleaved else _turned
        return *(turned(kind, self.cos, self.sin) for kind in kinds[:2]), kinds[2]  # type: ignore[return-value]

    def check(self, q: Tensor, roundings: float | None = None) -> None:
        """Queries as returned, keys and values as the cache has them, and nothing else in it."""
        expected = self.expected()
        assert_close(q, expected[0], roundings)
        for cache, wanted in zip((self.k, self.v), expected[1:], strict=True):
            places = cache.flatten(0, 1)
            assert_close(places[self.slots], wanted, roundings)
            others = torch.ones(len(places), dtype=torch.bool)
            others[self.slots] = False
            assert bool((places[others] == -7).all())


def _normed(heads: Tensor, dims: tuple[int, ...]) -> Tensor:
    return heads / (heads.square().mean(dim=dims, keepdim=True) + EPS).sqrt()


def _turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = heads[..., : cos.shape[2]].chunk(2, dim=2)
    c, s = (part.double().chunk(2, dim=2)[1] for part in (cos, sin))
    return torch.cat((low * c - high * s, high * c + low * s, heads[..., cos.shape[2] :]), dim=2)


def _neighbours_turned(heads: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair by the matrix of its turn."""
    out, pairs = heads.clone(), cos.shape[2] // 2
    for pair in range(pairs):
        c, s = (part[:, :, pairs + pair].double() for part in (cos, sin))
        one, two = heads[..., 2 * pair], heads[..., 2 * pair + 1]
        out[..., 2 * pair], out[..., 2 * pair + 1] = one * c - two * s, two * c + one * s
    return out


@both_paths
@pytest.mark.parametrize("clip", [None, 0.7])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(
    ("rows", "heads", "kv_heads", "size"), [(1, 4, 2, 16), (17, 5, 5, 24), (3, 20, 1, 8), (2, 9, 3, 2)]
)
def test_equals_the_definition(
    rows: int, heads: int, kv_heads: int, size: int, norm: Norm | None, clip: float | None
) -> None:
    case = Case(rows, heads, kv_heads, size, norm=norm, clip=clip)
    q, kv = case()
    assert q.shape == (rows, heads, size)
    assert kv is None
    case.check(q)


@both_paths
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize(("size", "rotated"), [(24, 8), (24, 10), (16, 14), (8, 0), (24, 24)])
def test_a_part_of_each_head_is_rotated(size: int, rotated: int, norm: Norm | None, interleaved: bool) -> None:
    case = Case(5, 9, 2, size, norm=norm, clip=1.5, rotated=rotated, interleaved=interleaved)
    q, kv = case(kv=True)
    case.check(q)
    assert kv is not None
    for own, wanted in zip(kv, case.expected()[1:], strict=True):
        assert_close(own, wanted)


@both_paths
@pytest.mark.parametrize("interleaved", [False, True])
def test_nan_reaches_its_partner_and_nothing_that_is_not_rotated(interleaved: bool) -> None:
    case = Case(1, 2, 1, 8, norm=None, rotated=4, interleaved=interleaved)
    case.qkv[0, 0], case.qkv[0, 8 + 5] = torch.nan, torch.nan
    q, _ = case()
    partner = 1 if interleaved else 2
    assert q.isnan().nonzero().tolist() == [[0, 0, 0], [0, 0, partner], [0, 1, 5]]


@both_paths
@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision(dtype: torch.dtype, norm: Norm | None) -> None:
    """The interpreter cuts bfloat16 off instead of rounding it: each of up to three roundings is off by one spacing."""
    case = Case(5, 6, 2, 32, norm=norm, dtype=dtype, clip=1.5)
    q, _ = case()
    assert q.dtype == dtype
    case.check(q, roundings=8)


@pytest.mark.parametrize("norm", NORMS)
def test_rounds_where_the_reference_rounds(norm: Norm | None) -> None:
    """In float16 one element in a hundred may fall to the other side, by the order in which squares are summed."""
    case = Case(20, 6, 2, 32, norm=norm, dtype=torch.float16, clip=1.5)
    found = []
    for path in ("torch", "triton"):
        with backend.forced(path):  # type: ignore[arg-type]
            q, kv = case(kv=True)
        assert kv is not None
        found.append(torch.cat((q, *kv), dim=1))
    assert float((found[0] != found[1]).float().mean()) < 0.01


@both_paths
@pytest.mark.parametrize("norm", NORMS)
def test_keys_and_values_are_returned_if_asked_for(norm: Norm | None) -> None:
    case = Case(5, 10, 9, 8, norm=norm, clip=1.0)
    q, kv = case(kv=True)
    assert kv is not None
    case.check(q)
    for own, wanted in zip(kv, case.expected()[1:], strict=True):
        assert_close(own, wanted)


@both_paths
def test_a_cache_of_another_dtype() -> None:
    case = Case(5, 4, 2, 16, dtype=torch.float32, cache_dtype=torch.float16)
    q, _ = case()
    expected = case.expected()
    assert_close(q, expected[0])
    for cache, wanted in zip((case.k, case.v), expected[1:], strict=True):
        assert cache.dtype == torch.float16
        assert_close(cache.flatten(0, 1)[case.slots], wanted)


@both_paths
@pytest.mark.parametrize("norm", NORMS)
def test_nan_stays_in_its_row_and_passes_the_clamp(norm: Norm | None) -> None:
    case = Case(3, 4, 2, 8, norm=norm, clip=1.0)
    case.qkv[1] = torch.nan
    q, _ = case()
    assert bool(q[1].isnan().all())
    for cache in (case.k, case.v):
        assert bool(cache.flatten(0, 1)[case.slots[1]].isnan().all())
    expected = case.expected()
    for row in (0, 2):
        assert_close(q[row], expected[0][row])
        assert_close(case.k.flatten(0, 1)[case.slots[row]], expected[1][row])


@both_paths
def test_nan_in_a_head_stays_in_that_head() -> None:
    case = Case(2, 10, 2, 8, norm="head")
    case.qkv[0, 3] = torch.nan
    q, _ = case()
    assert bool(q[0, 0].isnan().any())
    assert_close(q[0, 1:], case.expected()[0][0, 1:])


@both_paths
def test_no_rows() -> None:
    case = Case(0, 4, 2, 8)
    q, kv = case(kv=True)
    assert q.shape == (0, 4, 8)
    assert kv is not None
    assert [part.shape for part in kv] == [(0, 2, 8)] * 2
    assert bool((case.k == -7).all())


@both_paths
def test_angles_come_as_slices() -> None:
    """Of wider tensors, and with strides along the head."""
    case = Case(4, 4, 2, 8)
    case.cos = torch.cat((case.cos, case.cos), dim=2)[:, :, :8]
    strided = torch.stack((case.sin, case.sin), dim=3)[..., 0]
    assert strided.stride(2) == 2
    q, _ = case(sin_T1R=strided)
    case.check(q)


@both_paths
def test_rows_of_one_slot_leave_one_of_them() -> None:
    """As rows of no sequence do."""
    case = Case(3, 4, 2, 8)
    case.slots[:] = case.slots[0]
    _, kv = case(kv=True)
    assert kv is not None
    found = case.k.flatten(0, 1)[case.slots[0]]
    assert any(torch.equal(found, own) for own in kv[0])


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("rotated", [24, 10])
def test_nothing_is_touched_past_any_tensor(norm: Norm | None, rotated: int) -> None:
    """The last place of the cache is written; slots past it, which torch would refuse, go nowhere."""
    case = Case(7, 9, 3, 24, norm=norm, dtype=torch.float16, rotated=rotated)
    case.slots[0] = case.k.shape[0] * case.k.shape[1] - 1
    case.slots[1:] = torch.arange(6)
    for name in ("qkv", "cos", "sin", "slots", "k", "v", "weight"):
        if getattr(case, name) is not None:
            setattr(case, name, guarded(getattr(case, name)))
    with backend.forced("triton"):
        q, _ = case()
        case.check(q, roundings=8)
        case(slots_T=case.slots + (1 << 40))
        case(slots_T=torch.full_like(case.slots, -1))
        case.check(q, roundings=8)


@both_paths
def test_the_worked_example() -> None:
    k, v = torch.zeros(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    cos, sin = torch.zeros(1, 1, 2), torch.tensor([[[-1.0, 1.0]]])
    row = torch.tensor([[3.0, 4.0, 6.0, 8.0, 1.0, 2.0]])
    q, _ = qk_norm_rope_write(row, cos, sin, k, v, torch.tensor([0]), weight_CH=torch.ones(2, 2), eps=0.0)
    turned = torch.tensor([-0.8 * 2**0.5, 0.6 * 2**0.5])
    assert_close(q[0, 0], turned)
    assert_close(k[0, 0, 0], turned)
    assert v.tolist() == [[[[1, 2]]]]


CACHE = torch.zeros(2, 4, 2, 8)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"qkv_TO": torch.zeros(64)}, r"qkv must be \[T, O\]"),
        ({"qkv_TO": torch.zeros(3, 64, dtype=torch.float64)}, r"qkv must be \[T, O\]"),
        ({"qkv_TO": torch.zeros(64, 3).T}, "unit stride"),
        ({"qkv_TO": torch.zeros(3, 63)}, "qkv must hold query heads and twice 2 heads of 8"),
        ({"qkv_TO": torch.zeros(3, 32)}, "qkv must hold query heads"),
        ({"qkv_TO": None}, "qkv must be a tensor"),
        ({"k_PBJH": torch.zeros(2, 4, 16)}, r"k must be \[P, B, J, H\]"),
        ({"k_PBJH": CACHE.transpose(0, 1)}, "contiguous"),
        ({"v_PBJH": torch.zeros(2, 4, 1, 8)}, "both alike"),
        ({"k_PBJH": torch.zeros(2, 4, 2, 7), "v_PBJH": torch.zeros(2, 4, 2, 7)}, "heads must be even"),
        ({"cos_T1R": torch.zeros(2, 1, 8)}, r"cos \[T, 1, R\] must be"),
        ({"cos_T1R": torch.zeros(3, 8)}, r"cos \[T, 1, R\] must be"),
        ({"cos_T1R": torch.zeros(3, 1, 5)}, "even number of at most 8 elements"),
        ({"cos_T1R": torch.zeros(3, 1, 10)}, "even number of at most 8 elements"),
        ({"sin_T1R": torch.zeros(3, 1, 4)}, r"sin \[T, 1, R\] must be"),
        ({"sin_T1R": torch.zeros(3, 1, 8).half()}, r"sin \[T, 1, R\] must be torch.float32"),
        ({"slots_T": torch.zeros(3, dtype=torch.int32)}, r"slots \[T\] must be torch.int64"),
        ({"slots_T": torch.zeros(2, dtype=torch.int64)}, r"slots \[T\] must be"),
        ({"weight_CH": torch.zeros(8)}, r"weight \[N \+ J, H\] must be"),
        ({"weight_CH": torch.zeros(6, 8).half()}, r"weight \[N \+ J, H\] must be torch.float32"),
        ({"weight_CH": [1.0]}, "weight must be a tensor"),
        ({"norm": "heads"}, "norm must be one of"),
        ({"clip": 0.0}, "clip must be positive, found 0.0"),
        ({"qkv_TO": torch.zeros(3, 64, requires_grad=True)}, "no backward pass"),
    ],
)
def test_bad_arguments(change: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        Case(3, 4, 2, 8)(**change)


def test_tensors_on_two_devices() -> None:
    with pytest.raises(ArgumentError, match="slots is on meta, qkv on cpu"):
        Case(3, 4, 2, 8)(slots_T=torch.zeros(3, dtype=torch.int64, device="meta"))
