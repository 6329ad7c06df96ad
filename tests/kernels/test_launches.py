"""What the product launches is what is compiled, for a GPU that is not there (:mod:`testkit.gpu.absent`)."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest
from testkit.gpu import aot
from testkit.gpu.absent import GPUS
from testkit.gpu.calls import MORE, SERVED

CALLS = [*SERVED, *MORE]
PRODUCTS = {
    "grouped_gemm_kernel", "swapped_gemm_kernel", "small_in_kernel", "small_down_kernel", "grouped_outer_kernel",
    "rounded_gemm_kernel",
}  # fmt: skip
SPILLS: dict[str, set[str]] = {
    "experts-bf16-1-int4": {"gemv_down_kernel"},
    "experts-bf16-1-int8": {"gemv_down_kernel"},
    "experts-fp16-1-int4": {"gemv_down_kernel"},
    "experts-bf16-512-mxfp4": {"swapped_gemm_kernel"},
    "experts-bf16-16-int4-channel": {"small_in_kernel"},
    "experts-bf16-16-odd": {"small_in_kernel"},
    "experts-fp32-16-odd": {"small_in_kernel"},
    "experts-fp32-16-int8": {"small_in_kernel"},
    "experts-bf16-512-odd": {"swapped_gemm_kernel"},
    "experts-fp32-512": {"grouped_gemm_kernel"},
    "experts-fp32-512-odd": {"grouped_gemm_kernel"},
    **{f"invariant-{call}": {"grouped_gemm_kernel"} for call in ("experts-fp32", "linear-fp32")},
    **{f"invariant-{call}": {"grouped_gemm_kernel"} for call in ("experts-bf16-odd", "linear-bf16-odd")},
    **{call: {"clear_absent_kernel"} for call in MORE if call.startswith("trained-mlp")},
    "trained-mlp-fp32-odd": {"clear_absent_kernel", "grouped_gemm_kernel"},
    "trained-linear-bf16": {"clear_absent_kernel"},
    "trained-linear-bf16-grouped": {"clear_absent_kernel"},
    "trained-linear-fp32": {"clear_absent_kernel", "grouped_gemm_kernel"},
}
"""Kernels that need more registers than there are, by call, with the triton of ``constraints.txt``. Of what is served
only products in float32 are among them, which have no tensor cores."""
WGMMA_ROWS = 64
"""Of a tile, for Hopper's matrix instruction. Rounded rows are not its columns, as rows of other small products are."""
WEIGHTS_FIRST = {"gemv_down_kernel"}
"""They may read before they wait: the weights, and what was over before the launch before them began."""
REPOSITORY = Path(__file__).parents[2]


@pytest.mark.parametrize("call", CALLS)
def test_each_launch_compiles_for_an_h200(call: str) -> None:
    spilling = set()
    for launch in aot.launches(call, "sm_90"):
        code = launch.compiled()
        aot.assert_smem_fits(code)
        if code.stack or code.spills:
            spilling.add(launch.name)
        _check_products(launch, code)
        _check_wait(launch, code)
        _check_choices_that_no_interpreter_makes(launch)
    assert spilling == SPILLS.get(call, set())


@pytest.mark.parametrize("gpu", ["sm_80", "sm_100"])
@pytest.mark.parametrize("call", SERVED)
def test_each_launch_compiles_for_other_gpus(call: str, gpu: str) -> None:
    """Triton stands in for what a GPU lacks: on an A100 descriptors become pointers, on neither is there WGMMA."""
    for launch in aot.launches(call, gpu):
        code = launch.compiled()
        assert code.smem <= GPUS[gpu].shared, launch
        assert "wgmma" not in code.ptx, launch
        assert ("cp.async.bulk.tensor" in code.ptx) == (_described(launch) and gpu == "sm_100"), launch
        assert ("griddepcontrol" in code.ptx) == (gpu == "sm_100" and bool(launch.options["launch_pdl"])), launch


def _described(launch: aot.Launch) -> bool:
    return any(kind.startswith("tensordesc") for kind in launch.signature.values())


def _check_products(launch: aot.Launch, code: aot.Compiled) -> None:
    """Half types are multiplied on Hopper's tensor cores, what has a descriptor is brought by TMA, and quantised
    weights that threads unpack where they lie stay in registers."""
    assert ("cp.async.bulk.tensor" in code.ptx) == _described(launch), launch
    few_rows = launch.name == "rounded_gemm_kernel" and launch.constants["BLOCK_M"] < WGMMA_ROWS
    if launch.name in PRODUCTS and "fp32" not in (launch.signature.get("x") or launch.signature["h"]) and not few_rows:
        aot.assert_wgmma(code)
    if launch.constants.get("WORDS"):
        aot.assert_wgmma_from_registers(code)
        aot.assert_no_i2f(code)


def _check_wait(launch: aot.Launch, code: aot.Compiled) -> None:
    """A kernel that may be launched before the one before it is over waits for it before it touches memory."""
    waits = code.ptx.find("griddepcontrol.wait")
    assert (waits >= 0) == bool(launch.options["launch_pdl"]), launch
    if waits >= 0 and launch.name not in WEIGHTS_FIRST:
        assert not re.search(r"\b(ld|st|atom|red)\.global|cp\.async", code.ptx[:waits]), launch


def _check_choices_that_no_interpreter_makes(launch: aot.Launch) -> None:
    """Interpreted kernels widen bfloat16, which the interpreter cannot multiply, and do not look at the clock."""
    assert not launch.constants.get("UPCAST"), launch
    assert launch.constants.get("TIMED", True), launch
    if "DTYPE" in launch.constants:
        assert f"*{launch.constants['DTYPE']}" in launch.signature.values(), launch


def test_services_call_what_is_recorded() -> None:
    """The ops that services import, which are those of :data:`testkit.gpu.calls.SERVED`, and of weights that are held
    quantised. Types, and what makes weights with torch alone, launch nothing."""
    launch_nothing = {
        "Activation", "ArgumentError", "QuantisedWeight", "Weight", "fold_order", "from_codes", "quantize_experts",
        "stack_rows",
    }  # fmt: skip
    found = set()
    for path in (REPOSITORY / "services").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and re.fullmatch(r"moe_kernels(\..*op)?", node.module or ""):
                found |= {name.name for name in node.names}
    assert found - launch_nothing == {
        "route", "fused_moe", "combine", "paged_decode", "send_rows", "take_rows", "send_answers", "sum_answers",
        "take_joined", "send_joined", "add_rms_norm", "qk_norm_rope_write", "paged_attention", "paged_latent",
        "count_pairs", "quantised_linear",
    }  # fmt: skip
