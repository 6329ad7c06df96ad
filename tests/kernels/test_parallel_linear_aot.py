"""The row kernels around parallel_linear and sparse_mlp, compiled for an H200: nothing spills."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from testkit.gpu import aot

from moe_kernels.activations.op import Activation, gated

PLAN = {"order_S": "*i32", "ends_E": "*i32"}
GATES = {"gates_S": "*fp32"}


@pytest.mark.parametrize("activation", get_args(Activation))
def test_activation_kernels(activation: str) -> None:
    sizes = {"E": "i32", "F": "i32:16", "width": "i32:16"}
    constants: dict[str, Any] = {"ACT": activation, "GATED": gated(activation), "BLOCK": 1024}
    rows = dict.fromkeys(("du", "pre", "dpre", "weighted"), "*bf16")
    backward = aot.compile_sm90(
        "moe_kernels.training.activation_gradients.kernel:activation_backward_kernel",
        {**rows, **PLAN, **GATES, "dgates_S": "*fp32", **sizes},
        constants,
    )
    forward = aot.compile_sm90(
        "moe_kernels.training.activation_gradients.kernel:activation_forward_kernel",
        {"pre": "*bf16", "out": "*bf16", "ends_E": "*i32", **sizes},
        constants,
    )
    for kernel in (backward, forward):
        aot.assert_no_stack(kernel)
        assert kernel.registers <= 64  # eight blocks of four warps per multiprocessor hide the memory


@pytest.mark.parametrize("rows", ["token", "pair", "grouped"])
def test_pair_kernels(rows: str) -> None:
    group = aot.compile_sm90(
        "moe_kernels.training.pair_rows.kernel:group_rows_kernel",
        {"rows": "*bf16", "out": "*bf16", **GATES, **PLAN, "stride": "i32:16", "C": "i32:16", "E": "i32"},
        {"SLOTS": 4, "ROWS": rows, "BLOCK": 1024},
    )
    strides = dict.fromkeys(("stride_a", "stride_b", "C"), "i32:16")
    dots = aot.compile_sm90(
        "moe_kernels.training.pair_rows.kernel:pair_dots_kernel",
        {"a": "*bf16", "b": "*bf16", "out_S": "*fp32", "place_S": "*i32", "ends_E": "*i32", "E": "i32", **strides},
        {"SLOTS": 4, "A_ROWS": rows, "B_ROWS": "expert", "BLOCK": 1024, "BLOCK_E": 512},
    )
    total = aot.compile_sm90(
        "moe_kernels.training.grouped_outer.kernel:grouped_sum_kernel",
        {"dy": "*bf16", "out": "*bf16", **PLAN, **GATES, "stride": "i32:16", "O": "i32:16"},
        {"SLOTS": 4, "ROWS": rows, "HAS_GATES": True, "BLOCK_M": 32, "BLOCK_O": 128},
    )
    for kernel in (group, dots, total):
        aot.assert_no_stack(kernel)


def test_rotary_kernel() -> None:
    strides = dict.fromkeys([f"{tensor}_{axis}" for tensor in ("x", "out") for axis in "blkgr"], "i32:16")
    kernel = aot.compile_sm90(
        "moe_kernels.rotary.kernel:rotate_kernel",
        {"x": "*bf16", "out": "*bf16", "cos": "*fp32", "sin": "*fp32", **strides}
        | {"angle_b": "i32", "L": "i32", "HEADS": "i32"},
        {"GROUPS": 4, "REPEATS": 1, "HALF": 64, "BLOCK_H": 32, "BLOCK_C": 64},
    )
    aot.assert_no_stack(kernel)
