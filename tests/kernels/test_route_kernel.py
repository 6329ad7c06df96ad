"""route's kernel, interpreted, against its reference: every flag, ties, padding, odd values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import backend, route

both_paths = pytest.mark.usefixtures("path")
TOLERANCE = 8 * torch.finfo(torch.float32).eps
V3 = {"score": "sigmoid", "renormalise": True, "scale": 2.5}
CASES: list[tuple[int, int, dict[str, Any]]] = [
    (1, 1, {}),
    (5, 1, {"order": "choose_first"}),
    (8, 2, {"renormalise": True}),
    (60, 4, {}),
    (60, 8, {"score": "sigmoid", "order": "choose_first", "scale": 0.5}),
    (64, 3, {"order": "choose_first", "renormalise": True}),
    (128, 5, {"score": "sigmoid", "renormalise": True}),
    (128, 6, {"scale": 16.0}),
    (128, 7, {"score": "sigmoid"}),
    (128, 16, {"renormalise": True}),
    (160, 30, {"order": "choose_first"}),
    (512, 8, {"renormalise": True}),
    (512, 10, {"score": "sigmoid"}),
]
GROUPED: list[tuple[int, int, dict[str, Any]]] = [
    (256, 8, {"groups": 8, "top_groups": 4, "group_score": "top2_sum", **V3}),
    (160, 6, {"groups": 8, "top_groups": 3, "scale": 16.0}),
    (60, 4, {"groups": 5, "top_groups": 2, "group_score": "top2_sum"}),
    (16, 4, {"groups": 16, "top_groups": 4, "group_score": "top2_sum"}),
    (18, 6, {"groups": 3, "top_groups": 1, "order": "choose_first"}),
    (24, 8, {"groups": 3, "top_groups": 3}),
]


def logits(rows: int, experts: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Distinct in every row, also in half precision: no rounding decides between two experts."""
    ranks_TE = torch.rand(rows, experts, generator=torch.Generator().manual_seed(seed)).argsort(dim=1)
    return ((ranks_TE - experts / 2) / 32).to(dtype)


def both(logits_TE: Tensor, **flags: Any) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    with backend.forced("triton"):
        kernel = route(logits_TE, **flags)
    with backend.forced("torch"):
        return kernel, route(logits_TE, **flags)


def assert_equals_twin(logits_TE: Tensor, **flags: Any) -> tuple[Tensor, Tensor]:
    (ids_TK, weights_TK), (twin_ids_TK, twin_weights_TK) = both(logits_TE, **flags)
    assert ids_TK.dtype == twin_ids_TK.dtype
    assert torch.equal(ids_TK, twin_ids_TK)
    torch.testing.assert_close(weights_TK, twin_weights_TK, atol=TOLERANCE, rtol=TOLERANCE, equal_nan=True)
    return ids_TK, weights_TK


@pytest.mark.parametrize("biased", [False, True], ids=["plain", "biased"])
@pytest.mark.parametrize(("experts", "top_k", "flags"), CASES + GROUPED)
def test_equals_twin(experts: int, top_k: int, flags: dict[str, Any], biased: bool) -> None:
    bias_E = torch.randn(experts, generator=torch.Generator().manual_seed(1)) if biased else None
    assert_equals_twin(logits(6, experts), top_k=top_k, correction_bias_E=bias_E, **flags)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("top_k", range(1, 9))
def test_every_k_and_dtype(top_k: int, dtype: torch.dtype) -> None:
    assert_equals_twin(logits(3, 60, dtype), top_k=top_k, renormalise=True)


@given(
    st.lists(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 2.0]), min_size=12, max_size=12), min_size=1, max_size=4),
    st.sampled_from([{}, {"groups": 3, "top_groups": 2}, {"groups": 4, "top_groups": 2, "group_score": "top2_sum"}]),
)
@settings(max_examples=40, deadline=None)
def test_ties_go_to_the_lowest_id(rows: list[list[float]], groups: dict[str, Any]) -> None:
    assert_equals_twin(torch.tensor(rows), top_k=5, order="choose_first", **groups)


@both_paths
def test_any_strides() -> None:
    wide_TE = logits(10, 40)
    dense = route(wide_TE[::2, 4:36].contiguous(), top_k=3)
    for strided_TE in (wide_TE[::2, 4:36], wide_TE[::2, 4:36].t().contiguous().t()):
        assert not strided_TE.is_contiguous()
        for actual, expected in zip(route(strided_TE, top_k=3), dense, strict=True):
            assert torch.equal(actual, expected)


@both_paths
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("flags", [{}, {"score": "sigmoid", "renormalise": True}, {"order": "choose_first"}], ids=str)
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
def test_odd_values_stay_in_their_row(odd: float, flags: dict[str, Any]) -> None:
    clean_TE = logits(6, 12)
    dirty_TE = clean_TE.clone()
    dirty_TE[2, [3, 7]] = odd
    dirty_TE[4] = odd
    ids_TK, weights_TK = route(dirty_TE, top_k=4, **flags)
    clean_ids_TK, clean_weights_TK = route(clean_TE, top_k=4, **flags)
    assert [len(set(ids)) for ids in ids_TK.tolist()] == [4] * 6
    assert ((ids_TK >= 0) & (ids_TK < 12)).all()
    others = [0, 1, 3, 5]
    assert torch.equal(ids_TK[others], clean_ids_TK[others])
    assert torch.equal(weights_TK[others], clean_weights_TK[others])


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
@pytest.mark.parametrize("odd", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("flags", [{}, {"order": "choose_first"}, {"score": "sigmoid", "groups": 4, "top_groups": 2}])
def test_odd_values_choose_as_the_twin_does(odd: float, flags: dict[str, Any]) -> None:
    dirty_TE = logits(5, 12)
    dirty_TE[0], dirty_TE[1, 5], dirty_TE[2, 1:9], dirty_TE[3, ::2] = odd, odd, odd, -odd
    assert_equals_twin(dirty_TE, top_k=5, **flags)


@both_paths
def test_excluded_groups_stay_excluded() -> None:
    """A chosen group whose values are -inf still comes before a group that was not chosen."""
    bias_E = torch.tensor([9.0, -torch.inf, -torch.inf, 0.0, 0.0, 0.0])
    ids_TK, _ = route(torch.zeros(1, 6), top_k=3, correction_bias_E=bias_E, groups=2, top_groups=1)
    assert ids_TK.tolist() == [[0, 1, 2]]


@both_paths
def test_rows_that_have_ended() -> None:
    keep_T = torch.tensor([True, False, True, True, False])
    logits_TE = logits(5, 12)
    logits_TE[1] = torch.nan
    ids_TK, weights_TK = route(logits_TE, top_k=3, keep_T=keep_T)
    assert (ids_TK[~keep_T] == -1).all()
    assert (weights_TK[~keep_T] == 0).all()
    for kept_TK, all_TK in zip((ids_TK, weights_TK), route(logits_TE, top_k=3), strict=True):
        assert torch.equal(kept_TK[keep_T], all_TK[keep_T])


@both_paths
def test_ids_in_int32() -> None:
    ids_TK, _ = route(logits(3, 12), top_k=2, ids_dtype=torch.int32)
    assert ids_TK.dtype == torch.int32
    assert torch.equal(ids_TK, route(logits(3, 12), top_k=2)[0].int())


@both_paths
@pytest.mark.parametrize("groups", [{}, {"groups": 2, "top_groups": 1}], ids=str)
def test_no_rows(groups: dict[str, Any]) -> None:
    ids_TK, weights_TK = route(torch.zeros(0, 8), top_k=3, **groups)
    assert ids_TK.shape == weights_TK.shape == (0, 3)


def test_experts_that_lie_too_far_apart_for_int32_are_copied() -> None:
    """Column-major logits of 8 million rows, without their memory."""
    from moe_kernels.router.kernel import near

    far = torch.empty_strided((2**23, 512), (1, 2**23), device="meta")
    assert near(far).is_contiguous()
    for close in (far[:, :256], far[:, :1], torch.empty_strided((4, 512), (2**33, 1), device="meta")):
        assert near(close) is close
