"""fused_moe's arguments and the draws that break kernels: ragged, empty, absent, NaN. Each in all regimes."""

from __future__ import annotations

from functools import partial
from typing import Any, Final

import torch
from torch import Tensor

from bench import draws
from bench.bank import DTYPES
from bench.candidates import PRESETS
from bench.checks.base import Check, Layer, kernels, layer, random, references, require, share, unaligned
from bench.checks.layers import act
from bench.draws import Draw
from bench.tune import lookup
from bench.tune_workers import Work
from moe_kernels import tiles as table
from moe_kernels.experts.op import fused_moe
from moe_kernels.plan.op import plan
from moe_kernels.quant.op import dequantize_experts, quantize_experts
from moe_kernels.quant.weight import QuantisedWeight

SHAPE: Final = "olmoe/4"
UNGATED: Final = "scattermoe/8"
ROWS: Final = (1, 24, 400)
DTYPES_CHECKED: Final = ("bf16", "int8", "int4")
DRAWS: Final = ("one_expert", "ragged", "absent", "out_of_range", "all_absent", "int64")
OPTIONS: Final = ("biases", "weights_on_input", "keep", "local", "capacity")
SWITCHES: Final = (
    ("small.down", "COMBINE_LAUNCH", 0),
    ("small.down", "COMBINE_LAUNCH", 1),
    ("small.down", "PARTS_FP32", 1),
    ("small.down", "SPLIT_K", 3),
    ("small.in", "LISTS_LAUNCH", 1),
)
"""Ways through the small regime that a table may choose: checked whether or not this GPU's does."""
SWITCH_ROWS: Final = (5, 24, 200)
"""Fewer pairs than experts, more, and more than fit the registers."""
REPEATS: Final = 20
ACTIVATIONS: Final = ("swiglu_oai", "gelu", "gelu_tanh", "relu", "silu", "identity")


def option_checks() -> list[Check]:
    found = [
        Check(name=f"{kind} {dtype} rows {rows}", key=f"options {dtype}", run=partial(run, kind, dtype, rows))
        for dtype in DTYPES_CHECKED
        for rows in ROWS
        for kinds, run in (
            (DRAWS, check_draw),
            (OPTIONS, check_option),
            (("nan_row", "same_bits", "unaligned"), check_promise),
        )
        for kind in kinds
    ]
    found += [
        Check(
            name=f"{op} {name} {value} {dtype} rows {rows}",
            key=f"options {dtype}",
            run=partial(check_switch, op, name, value, dtype, rows),
        )
        for dtype in DTYPES_CHECKED
        for rows in SWITCH_ROWS
        for op, name, value in SWITCHES
    ]
    found += [
        Check(name=f"{name} rows {rows}", key=f"activation {name}", run=partial(check_activation, name, rows))
        for name in ACTIVATIONS
        for rows in ROWS
    ]
    found += [
        Check(name=f"quantise {bits} bits group {group}", key="quantise", run=partial(check_quantise, bits, group))
        for bits in (4, 8)
        for group in (0, 128)
    ]
    return [*found, Check(name="no rows", key="options bf16", run=check_no_rows)]


def check_draw(kind: str, dtype: str, rows: int, device: str) -> float:
    made = layer(SHAPE, dtype, "bf16", device)
    draw = _draw(kind, rows, made.shape.E, made.shape.k, device)
    return _compare(made, rows, draw, {}, {}, device)


def check_option(kind: str, dtype: str, rows: int, device: str) -> float:
    made = layer(SHAPE, dtype, "bf16", device)
    draw = draws.uniform(rows, made.shape.E, made.shape.k, device=device)
    given, exact = _option(kind, made, draw, device)
    return _compare(made, rows, draw, given, exact, device)


def check_promise(kind: str, dtype: str, rows: int, device: str) -> float:
    """NaN in a token leaves the others' bits alone; the same call gives the same bits, also where x lies elsewhere."""
    made = layer(SHAPE, dtype, "bf16", device)
    draw = draws.uniform(rows, made.shape.E, made.shape.k, device=device)
    x_TD = random((rows, made.shape.d), DTYPES["bf16"], device, seed=rows)
    first, x_again = _run(made, x_TD, draw, device), x_TD.clone()
    if kind == "unaligned":
        x_again = unaligned(x_TD)
    elif kind == "nan_row":
        x_again[rows // 2] = torch.nan
    second = _run(made, x_again, draw, device)
    others = [row for row in range(rows) if kind != "nan_row" or row != rows // 2]
    require(torch.equal(first[others], second[others]), "other rows changed")
    require(kind != "nan_row" or bool(second[rows // 2].isnan().all()), "the row with NaN has numbers")
    return 0.0


def check_switch(op: str, name: str, value: int, dtype: str, rows: int, device: str) -> float:
    """Right, and the same bits again and again: whichever program of a launch ends last."""
    made = layer(SHAPE, dtype, "bf16", device)
    draw = draws.uniform(rows, made.shape.E, made.shape.k, device=device)
    chosen = lookup(op, Work(shape=made.shape, dtype=dtype, device=device), rows)
    x_TD = random((rows, made.shape.d), DTYPES["bf16"], device, seed=rows)
    with table.overridden({"fused_moe": PRESETS["small"], op: {**chosen, name: value}}):
        first = _run(made, x_TD, draw, device)
        for _ in range(REPEATS if device != "cpu" else 1):
            require(torch.equal(_run(made, x_TD, draw, device), first), "another call gave other bits")
        return _compare(made, rows, draw, {}, {}, device)


def check_activation(name: str, rows: int, device: str) -> float:
    made = layer(SHAPE if name.startswith("swiglu") else UNGATED, "bf16", "bf16", device)
    draw = draws.uniform(rows, made.shape.E, made.shape.k, device=device)
    return _compare(made, rows, draw, {"activation": name}, {"activation": name}, device)


def check_no_rows(device: str) -> float:
    made = layer(SHAPE, "bf16", "bf16", device)
    x_TD = random((0, made.shape.d), DTYPES["bf16"], device, seed=0)
    ids = torch.zeros(0, made.shape.k, dtype=torch.int32, device=device)
    draw = Draw(ids_TK=ids, weights_TK=torch.zeros(0, made.shape.k, device=device), active=0)
    require(_run(made, x_TD, draw, device).shape == x_TD.shape, "shape")
    return 0.0


def check_quantise(bits: int, group: int, device: str) -> float:
    """Packs the same bytes as on a CPU, and packing what was unpacked changes nothing."""
    w_EOI = random((3, 256, 384), torch.bfloat16, device, seed=bits + group)
    here, there = quantize_experts(w_EOI, bits, group), quantize_experts(w_EOI.cpu(), bits, group)
    require(torch.equal(here.packed.cpu(), there.packed), "packed differs from the CPU's")
    require(torch.equal(here.scales.cpu(), there.scales), "scales differ from the CPU's")
    again: QuantisedWeight = quantize_experts(dequantize_experts(here), bits, group)
    require(torch.equal(again.packed, here.packed), "not idempotent")
    return 0.0


def _compare(made: Layer, rows: int, draw: Draw, given: dict[str, Any], exact: dict[str, Any], device: str) -> float:
    x_TD = random((rows, made.shape.d), DTYPES["bf16"], device, seed=rows)
    found = _run(made, x_TD, draw, device, **given)
    with references():
        expected = fused_moe(
            x_TD.float(), made.exact_in, made.exact_down, draw.ids_TK, draw.weights_TK,
            **{"activation": act(made), **exact},
        )  # fmt: skip
    return share(found, expected, x_TD.dtype)


def _run(made: Layer, x_TD: Tensor, draw: Draw, device: str, **given: Any) -> Tensor:
    with kernels(device):
        options = {"activation": act(made), **given}
        return fused_moe(x_TD, made.w_in, made.w_down, draw.ids_TK, draw.weights_TK, **options)


def _draw(kind: str, rows: int, experts: int, slots: int, device: str) -> Draw:
    draw = draws.uniform(rows, experts, slots, device=device)
    ids = draw.ids_TK.clone()
    if kind == "one_expert":
        ids.fill_(experts - 1)
    elif kind == "ragged":
        # A third of the pairs on expert 0, the odd experts empty.
        ids = torch.where(torch.arange(ids.numel(), device=device).view_as(ids) % 3 == 0, 0, ids // 2 * 2)
    elif kind == "absent":
        ids[:, ::2] = -1
    elif kind == "out_of_range":
        ids[::2] = torch.where(ids[::2] % 2 == 0, experts, 2**31 - 1)
    elif kind == "all_absent":
        ids.fill_(-1)
    else:
        ids = ids.long()
    return Draw(ids_TK=ids, weights_TK=draw.weights_TK, active=draw.active)


def _option(kind: str, made: Layer, draw: Draw, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """Keyword arguments for the kernel, and for the reference in float32."""
    rows, experts = draw.ids_TK.shape[0], made.shape.E
    if kind == "biases":
        given = {"bias_in": made.bias_in, "bias_down": made.bias_down}
        return given, {name: bias.float() for name, bias in given.items()}
    same: dict[str, Any] = {"weights_on": "input"}
    if kind == "keep":
        same = {"keep_T": torch.arange(rows, device=device) % 3 != 1}
    elif kind == "local":
        # Half of the ids live here, in reverse order.
        local = torch.arange(experts - 1, -1, -1, dtype=torch.int32, device=device)
        same = {"local_E": torch.where(local % 2 == 0, local, -1)}
    elif kind == "capacity":
        same = {"plan": plan(draw.ids_TK, experts, capacity=max(1, rows // 8))}
    return same, same
