"""Arguments that are no tensor, no integer, no number where one must be: an ArgumentError that says what was found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from testkit.models.moe_layers import random_layer
from torch import Tensor

from moe_kernels import (
    ArgumentError,
    MixtureOfAttention,
    QuantisedWeight,
    SparseMLP,
    combine,
    dequantize_experts,
    fused_moe,
    grouped_mlp,
    parallel_linear,
    plan,
    quantisation_error,
    quantize_experts,
    route,
    sparse_mlp,
)

LAYER = random_layer(5, hidden=16, width=8, experts=4, slots=2, activation="gelu", biased=True)
ORDER = plan(LAYER.ids_TK, 4, block_rows=16)
W_EOI = torch.randn(2, 3, 128, generator=torch.Generator().manual_seed(0))
QUANTISED = quantize_experts(W_EOI, 4)
EXPERTS: dict[str, Any] = {"w_in": LAYER.w_in, "w_down": LAYER.w_down, "activation": "gelu"}
CHOICE: dict[str, Any] = {"ids_TK": LAYER.ids_TK, "weights_TK": LAYER.weights_TK}
BIASES: dict[str, Any] = {"bias_in": LAYER.bias_in, "bias_down": LAYER.bias_down}
MASKS: dict[str, Any] = {"keep_T": torch.ones(5, dtype=torch.bool), "local_E": torch.arange(4, dtype=torch.int32)}
GATED: dict[str, Any] = {"gates_TK": LAYER.weights_TK, "bias_in": LAYER.bias_in, "bias_out": LAYER.bias_down}
PARTS: dict[str, Any] = {"packed": QUANTISED.packed, "scales": QUANTISED.scales}


def sparse_module(**given: Any) -> Tensor:
    y_TD: Tensor = SparseMLP(16, 8, experts=4, top_k=2)(**given)
    return y_TD


def attention(**given: Any) -> Tensor:
    y_BLD: Tensor = MixtureOfAttention(16, 4, heads=2, experts=4, top_k=2)(**given)
    return y_BLD


OPS: dict[str, tuple[Callable[..., Any], dict[str, Any]]] = {
    "route": (route, {"logits_TE": torch.ones(5, 4), "top_k": 2, "correction_bias_E": torch.ones(4)}),
    "plan": (plan, {"ids_TK": LAYER.ids_TK, "experts": 4, **MASKS}),
    "fused_moe": (fused_moe, {"x_TD": LAYER.x_TD, **EXPERTS, **CHOICE, **BIASES, **MASKS}),
    "grouped_mlp": (grouped_mlp, {"x_ND": LAYER.x_TD, "counts_E": torch.ones(4, dtype=torch.int32), **EXPERTS}),
    "combine": (combine, {"out_SD": W_EOI[0], "place_TK": torch.zeros(5, 2).int(), "weights_TK": torch.ones(5, 2)}),
    "parallel_linear": (
        parallel_linear,
        {"x": LAYER.x_TD, "w_EOI": LAYER.w_in, "plan": ORDER, "gates": LAYER.weights_TK, "bias_EO": LAYER.bias_in},
    ),
    "sparse_mlp": (
        sparse_mlp,
        {"x_TD": LAYER.x_TD, "w_in": LAYER.w_in, "w_out": LAYER.w_down, "plan": ORDER, **GATED},
    ),
    "SparseMLP": (sparse_module, {"x": LAYER.x_TD, "ids_TK": LAYER.ids_TK, "gates_TK": LAYER.weights_TK}),
    "SparseMLP by logits": (sparse_module, {"x": LAYER.x_TD, "logits_TE": torch.ones(5, 4)}),
    "MixtureOfAttention": (
        attention,
        {"x_BLD": LAYER.x_TD[None], "logits_TE": torch.ones(5, 4), "positions_BL": torch.arange(5)[None]},
    ),
    "quantize_experts": (quantize_experts, {"w_EOI": W_EOI, "bits": 4}),
    "dequantize_experts": (dequantize_experts, {"q": QUANTISED}),
    "quantisation_error": (quantisation_error, {"w_EOI": W_EOI, "q": QUANTISED}),
    "QuantisedWeight": (QuantisedWeight, {**PARTS, "bits": 4, "group": 128, "in_features": 128}),
}
TENSORS = [
    (op, name) for op, (_, given) in OPS.items() for name, value in given.items() if not isinstance(value, str | int)
]
OPTIONAL = {
    *("correction_bias_E", "keep_T", "local_E", "gates", "bias_in", "bias_down", "bias_out", "bias_EO", "positions_BL"),
    *("combine: weights_TK", "SparseMLP: ids_TK", "SparseMLP: gates_TK"),
    *("SparseMLP by logits: logits_TE", "MixtureOfAttention: logits_TE"),
}
"""Names, or names of one op, that may be None, or whose lack is said in other words."""


@pytest.mark.parametrize("op", OPS)
def test_the_calls_below_are_right_but_for_one_argument(op: str) -> None:
    run, given = OPS[op]
    run(**given)


@pytest.mark.parametrize(("op", "name"), TENSORS)
def test_what_is_no_tensor_is_named(op: str, name: str) -> None:
    run, given = OPS[op]
    words = name.rpartition("_")[0] if name.rpartition("_")[2].isupper() else name
    wrong: list[Any] = [[1, 2], "text", {}]
    if isinstance(given[name], Tensor):
        wrong += [given[name].numpy(), given[name].to_sparse()]
    if not {name, f"{op}: {name}"} & OPTIONAL:
        wrong.append(None)
    for value in wrong:
        found = "found None" if value is None else "(found|sparse)"
        with pytest.raises(ArgumentError, match=rf"^({words}|w|weights|packed weights)\b.*{found}"):
            run(**{**given, name: value})


@pytest.mark.parametrize(
    ("op", "name", "value", "words"),
    [
        ("route", "groups", 2.0, "groups must be an integer, found 2.0"),
        ("route", "groups", 0, "groups must be at least 1, found 0"),
        ("route", "groups", "a", "groups must be an integer, found 'a'"),
        ("route", "top_groups", 1.5, "top_groups must be an integer, found 1.5"),
        ("route", "top_k", True, "top_k must be in 1..4 .*found True"),
        ("route", "top_k", [2], r"top_k must be in 1..4 .*found \[2\]"),
        ("route", "scale", "x", "scale must be a number, found str 'x'"),
        ("route", "scale", torch.tensor(2.0), r"scale must be a number, found .*float32 of shape \(\)"),
        ("plan", "experts", True, "experts must be an integer, found True"),
        ("plan", "experts", 2**33, "experts must be at most .*found 8589934592"),
        ("plan", "block_rows", 2**40, "block_rows must be at most .*found 1099511627776"),
        ("plan", "block_rows", True, "block_rows must be an integer, found True"),
        ("plan", "capacity", True, "capacity must be an integer, found True"),
        ("quantize_experts", "bits", 4.0, "bits must be 4 or 8, found 4.0"),
        ("quantize_experts", "group", False, "group must be 0 .*found False"),
        ("quantize_experts", "w_EOI", W_EOI.to("meta"), r"weights must have values, found .*\(2, 3, 128\) on meta"),
        ("QuantisedWeight", "in_features", 128.0, "in_features must be an integer, found 128.0"),
    ],
)
def test_numbers(op: str, name: str, value: Any, words: str) -> None:
    run, given = OPS[op]
    with pytest.raises(ArgumentError, match=words):
        run(**{**given, name: value})


@pytest.mark.parametrize("size", ["hidden", "width", "experts", "top_k"])
@pytest.mark.parametrize("value", [1.0, True, None, "8"])
def test_sizes_of_a_sparse_mlp(size: str, value: Any) -> None:
    with pytest.raises(ArgumentError, match=f"{size} must be an integer, found {value!r}"):
        SparseMLP(**{"hidden": 8, "width": 12, "experts": 3, "top_k": 2, size: value})


@pytest.mark.parametrize("size", ["hidden", "head_size", "heads", "experts", "top_k", "key_heads"])
@pytest.mark.parametrize("value", [1.0, True, "8"])
def test_sizes_of_a_mixture_of_attention(size: str, value: Any) -> None:
    sizes = {"hidden": 8, "head_size": 4, "heads": 2, "experts": 3, "top_k": 2, size: value}
    with pytest.raises(ArgumentError, match=f"{size} must be an integer, found {value!r}"):
        MixtureOfAttention(**sizes)


def test_the_base_of_rotary_frequencies() -> None:
    wrong: Any = "x"
    with pytest.raises(ArgumentError, match="rope_theta must be a number or None, found str 'x'"):
        MixtureOfAttention(8, 4, heads=2, experts=3, top_k=2, rope_theta=wrong)


def test_experts_of_a_shard() -> None:
    wrong: Any = "a"
    with pytest.raises(ArgumentError, match="counted by integers, found 'a' and 2"):
        QUANTISED.experts(wrong, 2)


@pytest.mark.parametrize(("bits", "group"), [(4, 128), (4, 0), (8, 128), (8, 0)])
@pytest.mark.parametrize("shape", [(2, 0, 128), (0, 3, 128)])
def test_weights_without_rows_are_empty(shape: tuple[int, ...], bits: int, group: int) -> None:
    w_EOI = torch.empty(shape)
    stored = quantize_experts(w_EOI, bits, group)
    assert dequantize_experts(stored).shape == shape
    assert quantisation_error(w_EOI, stored).relative_rms_E.tolist() == [0] * shape[0]
