"""route against its meaning for one row in Python floats, and its promises about ties and dtypes."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_kernels import ArgumentError, reference, route

both_paths = pytest.mark.usefixtures("path")
TOLERANCE = 4 * torch.finfo(torch.float32).eps

FLAGS: list[dict[str, Any]] = [
    {"score": score, "order": order, "renormalise": renormalise, "scale": scale, **groups}
    for score, order, renormalise, scale, groups in itertools.product(
        ("softmax", "sigmoid"),
        ("score_first", "choose_first"),
        (False, True),
        (1.0, 2.5),
        (
            {},
            {"groups": 4, "top_groups": 2, "group_score": "max"},
            {"groups": 4, "top_groups": 2, "group_score": "top2_sum"},
        ),
    )
]


def random_logits(rows: int, experts: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, experts, generator=torch.Generator().manual_seed(seed)) * 3


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("flags", FLAGS, ids=lambda flags: "-".join(str(value) for value in flags.values()))
def test_equals_the_definition(flags: dict[str, Any], biased: bool) -> None:
    logits_TE, bias_E = random_logits(40, 16, seed=1), random_logits(1, 16, seed=2)[0] if biased else None
    ids_TK, weights_TK = route(logits_TE, top_k=5, correction_bias_E=bias_E, **flags)
    assert ids_TK.dtype == torch.int64
    assert weights_TK.dtype == torch.float32
    bias = bias_E.tolist() if bias_E is not None else None
    for logits, ids, weights_K in zip(logits_TE.tolist(), ids_TK.tolist(), weights_TK, strict=True):
        expected_ids, expected = reference.route_row(logits, top_k=5, correction_bias=bias, **flags)
        assert ids == expected_ids
        torch.testing.assert_close(weights_K, torch.tensor(expected), atol=TOLERANCE, rtol=TOLERANCE)


@both_paths
def test_example_of_the_docstring() -> None:
    logits_TE = torch.tensor([[0, math.log(2), 0, math.log(4)]])
    ids_TK, weights_TK = route(logits_TE, top_k=2)
    assert ids_TK.tolist() == [[3, 1]]
    torch.testing.assert_close(weights_TK, torch.tensor([[0.5, 0.25]]))
    torch.testing.assert_close(route(logits_TE, top_k=2, renormalise=True)[1], torch.tensor([[2 / 3, 1 / 3]]))
    assert route(logits_TE, top_k=3)[0].tolist() == [[3, 1, 0]]


@given(st.lists(st.lists(st.sampled_from([-1.0, -0.0, 0.0, 2.0]), min_size=6, max_size=6), min_size=1, max_size=5))
@settings(max_examples=200)
def test_ties_go_to_the_lowest_id(rows: list[list[float]]) -> None:
    ids_TK, _ = route(torch.tensor(rows), top_k=4)
    for row, ids in zip(rows, ids_TK.tolist(), strict=True):
        assert ids == sorted(range(6), key=lambda expert: (-row[expert], expert))[:4]


@both_paths
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_half_precision_logits_are_scored_in_float32(dtype: torch.dtype) -> None:
    logits_TE = random_logits(30, 8, seed=3).to(dtype)
    for half, full in zip(route(logits_TE, top_k=3), route(logits_TE.float(), top_k=3), strict=True):
        assert torch.equal(half, full)


@both_paths
def test_choice_does_not_depend_on_the_batch() -> None:
    logits_TE = random_logits(64, 16, seed=4)
    ids_TK, weights_TK = route(logits_TE, top_k=4, renormalise=True)
    for row in (0, 17, 63):
        ids_1K, weights_1K = route(logits_TE[row : row + 1], top_k=4, renormalise=True)
        assert torch.equal(ids_1K[0], ids_TK[row])
        torch.testing.assert_close(weights_1K[0], weights_TK[row], atol=TOLERANCE, rtol=TOLERANCE)


@both_paths
def test_extreme_logits_still_choose_distinct_experts() -> None:
    extreme = torch.tensor([[1e30, -1e30, 0.0, 1.0], [-torch.inf] * 3 + [0.0], [torch.nan] * 4])
    ids_TK, weights_TK = route(extreme, top_k=3)
    assert [sorted(set(ids)) == sorted(ids) for ids in ids_TK.tolist()] == [True] * 3
    assert ((ids_TK >= 0) & (ids_TK < 4)).all()
    assert weights_TK[:2].isfinite().all()


@both_paths
@pytest.mark.filterwarnings("ignore:overflow:RuntimeWarning")
def test_vanishing_sigmoid_scores_do_not_divide_by_zero() -> None:
    _, weights_TK = route(torch.full((1, 4), -1e4), top_k=2, score="sigmoid", renormalise=True)
    assert weights_TK.isfinite().all()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"logits_TE": torch.zeros(8)}, r"logits must be \[T, E\]"),
        ({"logits_TE": torch.zeros(2, 8, dtype=torch.int64)}, "floating point"),
        ({"top_k": 9}, r"top_k must be in 1\.\.8"),
        ({"top_k": 0}, "top_k"),
        ({"groups": 3}, "groups=3"),
        ({"groups": 2, "top_groups": 3}, r"top_groups must be in 1\.\.2"),
        ({"top_k": 3, "groups": 4, "top_groups": 1}, r"1\.\.2"),
        ({"score": "tanh"}, "score must be"),
        ({"order": "last"}, "order must be"),
        ({"group_score": "mean"}, "group_score must be"),
        ({"ids_dtype": torch.int16}, "ids_dtype must be"),
        ({"keep_T": torch.ones(3, dtype=torch.bool)}, r"keep \[T\] must be torch.bool of shape \(2,\)"),
        ({"keep_T": torch.ones(2)}, r"keep \[T\] must be torch.bool"),
        ({"keep_T": torch.ones(2, dtype=torch.bool, device="meta")}, "keep is on meta, logits on cpu"),
        ({"correction_bias_E": torch.zeros(7)}, r"correction_bias must be \[8\]"),
        ({"correction_bias_E": torch.ones(8, dtype=torch.int32)}, "correction_bias must be floating point"),
        ({"correction_bias_E": torch.ones(8, device="meta")}, "correction_bias is on meta, logits on cpu"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value),
)
def test_wrong_arguments_are_named(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        route(**{"logits_TE": torch.zeros(2, 8), "top_k": 1, **changes})


@pytest.mark.parametrize("experts", [6, 8, 60])
@pytest.mark.parametrize("flags", FLAGS[::6], ids=lambda flags: "-".join(str(value) for value in flags.values()))
def test_a_row_has_the_same_bits_whatever_others_there_are(flags: dict[str, Any], experts: int) -> None:
    logits_TE = random_logits(67, experts, seed=5)
    all_ids, all_weights = route(logits_TE, top_k=4, **flags)
    for row in range(len(logits_TE)):
        ids_TK, weights_TK = route(logits_TE[row : row + 1], top_k=4, **flags)
        assert torch.equal(ids_TK[0], all_ids[row])
        assert torch.equal(weights_TK[0], all_weights[row])
