"""fused_moe on what does not fit: an ArgumentError that names the argument and shows its shape."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from testkit.models.moe_layers import random_layer

from moe_kernels import ArgumentError, plan

LAYER = random_layer(5, hidden=16, width=8, experts=4, slots=2, biased=True)


def shown(value: Any) -> str:
    """A regular expression for the part of a message that describes a tensor."""
    return re.escape(str(tuple(value.shape))) if isinstance(value, torch.Tensor) else re.escape(repr(value))


def cut(name: str, *at: Any) -> dict[str, Any]:
    return {name: getattr(LAYER, name)[at]}


@pytest.mark.parametrize(
    ("changes", "argument"),
    [
        (cut("x_TD", 0), "x"),
        (cut("x_TD", slice(None), slice(8)), "x|w_in|w_down"),
        (cut("x_TD", slice(3)), "x|ids|weights"),
        (cut("w_in", 0), "w_in"),
        (cut("w_in", slice(3)), "w_in"),
        (cut("w_in", slice(None), slice(8)), "w_in"),
        (cut("w_in", slice(None), slice(None), slice(8)), "w_in"),
        (cut("w_down", 0), "w_down"),
        (cut("w_down", slice(3)), "w_in|w_down"),
        (cut("w_down", slice(None), slice(4)), "w_down"),
        (cut("w_down", slice(None), slice(None), slice(4)), "w_in|w_down"),
        (cut("ids_TK", 0), "ids"),
        (cut("ids_TK", slice(3)), "ids"),
        (cut("ids_TK", slice(None), slice(1)), "ids|weights"),
        (cut("weights_TK", 0), "weights"),
        (cut("weights_TK", slice(3)), "weights"),
        (cut("weights_TK", slice(None), slice(1)), "weights"),
        (cut("bias_in", 0), "bias_in"),
        (cut("bias_in", slice(None), slice(8)), "bias_in"),
        (cut("bias_down", slice(3)), "bias_down"),
        (cut("bias_down", slice(None), slice(4)), "bias_down"),
    ],
    ids=lambda value: value if isinstance(value, str) else next(iter(value)),
)
def test_wrong_shapes_are_named(changes: dict[str, Any], argument: str) -> None:
    wrong = LAYER.but(**changes)
    shapes = "|".join(shown(tensor) for tensor in wrong.tensors().values())
    with pytest.raises(ArgumentError, match=rf"(?s)\b({argument})\b.*({shapes})"):
        wrong()


WRONG_DTYPES = {
    "x_TD": [torch.float64, torch.int32],
    "w_in": [torch.float16],
    "w_down": [torch.bfloat16, torch.int8],
    "ids_TK": [torch.float32, torch.uint8, torch.bool],
    "weights_TK": [torch.float16, torch.float64],
    "bias_in": [torch.float16],
    "bias_down": [torch.float64],
}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, dtypes in WRONG_DTYPES.items() for dtype in dtypes], ids=str
)
def test_wrong_dtypes_are_named(name: str, dtype: torch.dtype) -> None:
    argument = name.removesuffix("_TD").removesuffix("_TK")
    with pytest.raises(ArgumentError, match=rf"(?s)\b{argument}\b.*{dtype}.*\({LAYER.tensors()[name].shape[0]}, "):
        LAYER.but(**{name: LAYER.tensors()[name].to(dtype)})()


@pytest.mark.parametrize("name", ["w_in", "w_down", "ids_TK", "weights_TK", "bias_in", "bias_down"])
def test_other_devices_are_named(name: str) -> None:
    argument = name.removesuffix("_TK")
    with pytest.raises(ArgumentError, match=rf"(?s)\b{argument}\b.*meta"):
        LAYER.but(**{name: LAYER.tensors()[name].to("meta")})()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"activation": "tanh"}, "'tanh'"),
        ({"activation": "SwiGLU"}, "'SwiGLU'"),
        ({"weights_on": "both"}, "'both'"),
        ({"activation": "relu", "bias_in": None}, r"w_in.*\(4, 8, 16\).*found.*\(4, 16, 16\)"),
    ],
)
def test_flags_that_are_unknown_or_of_another_layer_are_named(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        LAYER.but(**flags)()


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"keep_T": torch.ones(4, dtype=torch.bool)}, r"keep.*\(4,\)"),
        ({"keep_T": torch.ones(5, 1, dtype=torch.bool)}, r"keep.*\(5, 1\)"),
        ({"keep_T": torch.ones(5)}, r"keep.*float32"),
        ({"local_E": torch.zeros(4, 1, dtype=torch.int32)}, r"local.*\(4, 1\)"),
        ({"local_E": torch.zeros(4)}, r"local.*float32"),
        ({"keep_T": torch.ones(5, dtype=torch.bool, device="meta")}, "keep.*meta"),
        ({"plan": plan(LAYER.ids_TK[:3], 4)}, "plan"),
        ({"plan": plan(LAYER.ids_TK, 7)}, "plan"),
    ],
)
def test_masks_tables_and_plans_of_another_call_are_named(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        LAYER(**extra)
