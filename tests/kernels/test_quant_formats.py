"""Every format of quantised weights: its values by definition, how it is cut, stacked, filled and checked."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from testkit.models.quantised import KINDS, random_weight
from torch import Tensor

from moe_kernels import (
    ArgumentError,
    QuantisedWeight,
    backend,
    dequantize_experts,
    from_codes,
    quantize_experts,
    scales_as,
)
from moe_kernels import stack_rows as stacked
from moe_kernels.quant.packing import pack, unpack
from moe_kernels.reference import weight_value

kinds = pytest.mark.parametrize("kind", KINDS)


@kinds
@pytest.mark.parametrize("columns", [256, 208])
def test_values_are_those_of_the_definition(kind: str, columns: int) -> None:
    q = random_weight(kind, 2, 5, columns)
    w_EOI = dequantize_experts(q, torch.float64)
    for expert, row in ((0, 4), (1, 0)):
        expected = torch.tensor([weight_value(q, expert, row, column) for column in range(columns)])
        torch.testing.assert_close(w_EOI[expert, row].float(), expected, rtol=2**-22, atol=0)


@kinds
@pytest.mark.parametrize("path", ["triton"])
@pytest.mark.usefixtures("path")
def test_the_kernel_is_its_twin(kind: str) -> None:
    q = random_weight(kind, 2, 20, 336)
    q.zeros is None or q.zeros[0, 0].fill_(16)
    with backend.forced("torch"):
        expected_EOI = dequantize_experts(q, torch.float16)
    assert torch.equal(dequantize_experts(q, torch.float16), expected_EOI)


def test_every_small_float_is_torchs() -> None:
    """256 patterns of e4m3, the two NaN left out; and the sixteen of e2m1 from the OCP's table."""
    codes = torch.arange(256, dtype=torch.uint8).view(1, 1, 256)
    codes[..., [0x7F, 0xFF]] = 0
    q = from_codes(codes, torch.ones(1, 1, 1), bits=8, group=0, codes="e4m3")
    assert torch.equal(dequantize_experts(q), codes.view(torch.float8_e4m3fn).float())
    halves = from_codes(codes[..., :16], torch.full((1, 1, 1), 128, dtype=torch.uint8), bits=4, group=32, codes="e2m1")
    positive = [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0]
    assert dequantize_experts(halves).flatten().tolist() == positive + [-value for value in positive]


@kinds
def test_parts_go_and_come_back(kind: str) -> None:
    """By name, expert by expert, through a file, and from nothing."""
    q = random_weight(kind, 3, 4, 256)
    parts = q.tensors()
    assert {part.shape[0] for part in parts.values()} == {3}
    assert q.nbytes == sum(part.nbytes for part in parts.values())
    file = io.BytesIO()
    torch.save(q, file)
    file.seek(0)
    blank = QuantisedWeight.empty(
        q.shape, bits=q.bits, group=q.group, codes=q.codes, scale_rows=q.scale_rows, zeros=q.zeros is not None,
        ordered=q.order is not None, scale_type=q.scales.dtype,
    )  # fmt: skip
    for expert in range(3):
        for name, part in blank.experts(expert, expert + 1).tensors().items():
            part.copy_(parts[name][expert : expert + 1])
    for again in (torch.load(file), q.with_tensors(parts), blank, q.to("cpu")):
        assert again.format == q.format
        assert torch.equal(dequantize_experts(again), dequantize_experts(q))
    with pytest.raises(ArgumentError, match=r"has the parts .*'packed', 'scales'.*found \['packed'\]"):
        q.with_tensors({"packed": q.packed})


@kinds
def test_cuts_hold_the_same_numbers(kind: str) -> None:
    q = random_weight(kind, 2, 8, 304)
    w_EOI = dequantize_experts(q)
    step = q.scale_rows
    assert torch.equal(dequantize_experts(q.rows(step, 8)), w_EOI[:, step:])
    assert torch.equal(dequantize_experts(q.rows(0, step)), w_EOI[:, :step])
    if q.order is None:
        assert torch.equal(dequantize_experts(q.columns(128, 304)), w_EOI[:, :, 128:])
        assert torch.equal(dequantize_experts(q.columns(0, 128)), w_EOI[:, :, :128])
        assert q.columns(0, 256).packed.data_ptr() != q.packed.data_ptr()


@kinds
def test_what_cannot_be_cut_is_named(kind: str) -> None:
    q = random_weight(kind, 2, 8, 304)
    rule = "another order" if q.order is not None else "ends? at multiples of|not all among"
    with pytest.raises(ArgumentError, match=rule):
        q.columns(0, 8)
    with pytest.raises(ArgumentError, match=r"columns -1..127|another order"):
        q.columns(-1, 128)
    if q.scale_rows > 1:
        with pytest.raises(ArgumentError, match=f"rows 1..7 of .*: {q.scale_rows} rows share a scale"):
            q.rows(1, 8)
    with pytest.raises(ArgumentError, match=r"rows 0..8 are not all among the 8"):
        q.rows(0, 9)


@kinds
@pytest.mark.parametrize("rows", [4, 6, 3])
def test_gate_above_up(kind: str, rows: int) -> None:
    """Where blocks of rows end inside of the upper matrix, the stacked one has smaller blocks."""
    upper, lower = random_weight(kind, 2, rows, 256), random_weight(kind, 2, 5, 256, seed=1)
    if upper.order is not None:
        with pytest.raises(ArgumentError, match="different orders"):
            stacked(upper, lower)
        lower = replace(lower, order=upper.order)
    both = stacked(upper, lower)
    assert torch.equal(dequantize_experts(both), torch.cat([dequantize_experts(upper), dequantize_experts(lower)], 1))


def test_other_formats_do_not_stack() -> None:
    with pytest.raises(ArgumentError, match=r"found int8 g128 of shape .* below int4 g128"):
        stacked(random_weight("int4 g128", 2, 4, 256), random_weight("int8 g128", 2, 4, 256))


ROUNDED = {kind: sizes for kind, sizes in KINDS.items() if "ordered" not in sizes and "scale_type" not in sizes}


@pytest.mark.parametrize("kind", ROUNDED)
@pytest.mark.parametrize("columns", [256, 208, 16])
def test_one_expert_at_a_time(kind: str, columns: int) -> None:
    w_EOI = torch.randn(3, 8, columns, generator=torch.Generator().manual_seed(0))
    sizes = ROUNDED[kind]
    whole = quantize_experts(w_EOI, **sizes)
    parts = QuantisedWeight.empty((3, 8, columns), **sizes)
    for expert in range(3):
        into = parts.experts(expert, expert + 1)
        assert quantize_experts(w_EOI[expert : expert + 1], **sizes, into=into) is into
    for name, part in whole.tensors().items():
        assert torch.equal(part, parts.tensors()[name])


@pytest.mark.parametrize(
    ("kind", "most"),
    [("int4 g32", 0.1), ("int4 g128 zeros", 0.13), ("int8 g128", 0.01), ("e4m3 4x128", 0.03), ("e2m1 g32", 0.15)],
)
def test_rounding_loses_what_the_format_must(kind: str, most: float) -> None:
    """rms of the error over rms of normal weights, and no error beyond a value's own neighbours in small floats."""
    w_EOI = torch.randn(2, 64, 512, generator=torch.Generator().manual_seed(0))
    q = quantize_experts(w_EOI, **KINDS[kind])
    error_EOI = dequantize_experts(q) - w_EOI
    assert most / 2 < error_EOI.square().mean().sqrt() < most
    if q.codes == "e4m3":
        assert (error_EOI.abs() <= w_EOI.abs() / 16 + w_EOI.abs().max() / 448 * 2**-10 * 2).all()


def test_nearest_e2m1_by_hand() -> None:
    """Scale 2: 8 and 12 are the largest; halfway values go to the even code; 15 becomes 12, zero groups stay zero."""
    w_EOI = torch.zeros(1, 1, 64)
    given = [15.0, -12.0, 0.5, 1.5, 2.5, -5.0, 7.0, 10.0, 0.51]
    w_EOI[0, 0, : len(given)] = torch.tensor(given)
    q = quantize_experts(w_EOI, 4, 32, codes="e2m1")
    assert dequantize_experts(q)[0, 0, : len(given)].tolist() == [12.0, -12.0, 0.0, 2.0, 2.0, -4.0, 8.0, 8.0, 1.0]
    assert q.scales.tolist() == [[[128, 0]]]


def test_zero_points_reach_both_extremes() -> None:
    w_EOI = torch.full((1, 1, 128), 1.0)
    w_EOI[0, 0, 5], w_EOI[0, 0, 6] = -2, 13
    q = quantize_experts(w_EOI, 4, zeros=True)
    assert (q.scales.item(), q.zeros is not None and q.zeros.item()) == (1.0, 2)
    assert torch.equal(dequantize_experts(q), w_EOI)


@pytest.mark.parametrize(
    ("shape", "bits", "group"),
    [((1, 5, 256), 4, 64), ((1, 5, 256), 8, 128), ((1, 6, 256), 4, 128), ((2, 5, 256), 4, 0)],
)
def test_into_another_weight_is_named(shape: tuple[int, int, int], bits: int, group: int) -> None:
    into = QuantisedWeight.empty(shape, bits=bits, group=group)
    with pytest.raises(ArgumentError, match=r"into must be int4 g128 of shape \(1, 5, 256\).*found int"):
        quantize_experts(torch.ones(1, 5, 256), 4, 128, into=into)


@pytest.mark.parametrize("columns", [128, 16, 208, 384])
def test_packing_and_back(columns: int) -> None:
    codes = torch.randint(0, 16, (3, columns), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(unpack(pack(codes, 4), 4, columns), codes)


def test_columns_sorted_by_group() -> None:
    """Act-order: columns of a checkpoint name their group."""
    generator = torch.Generator().manual_seed(2)
    codes = torch.randint(0, 16, (2, 3, 64), dtype=torch.uint8, generator=generator)
    scales = torch.rand(2, 3, 2, generator=generator) + 1
    group_of = torch.stack([torch.randperm(64, generator=generator) // 32 for _ in range(2)])
    q = from_codes(codes, scales, bits=4, group=32, group_of=group_of)
    expected = (codes.float() - 8) * scales.gather(2, group_of.unsqueeze(1).expand(2, 3, 64))
    assert q.order is not None
    assert torch.equal(dequantize_experts(q), expected)
    ascending = (torch.arange(64) // 32).expand(2, 64)
    assert from_codes(codes, scales, bits=4, group=32, group_of=ascending).order is None


def a_weight(**changes: Any) -> QuantisedWeight:
    given: dict[str, Any] = {"codes_EOI": torch.ones(1, 2, 64, dtype=torch.uint8), "scales": torch.ones(1, 2, 2)}
    given |= {"bits": 8, "group": 32} | changes
    return from_codes(**given)


def with_one(value: float, dtype: torch.dtype = torch.float32) -> Tensor:
    scales = torch.ones(1, 2, 2, dtype=dtype)
    scales[0, 1, 1] = value
    return scales


BAD: dict[str, Callable[[], object]] = {
    "must not be 0, found 1 of them": partial(a_weight, scales=with_one(0)),
    "must be finite torch.bfloat16, found NaN": partial(a_weight, scales=with_one(torch.nan, torch.bfloat16)),
    "must be finite torch.float16": partial(a_weight, scales=with_one(1e9, torch.float16)),
    r"E8M0's NaN \(255\)": partial(a_weight, scales=with_one(255, torch.uint8), bits=4, codes="e2m1"),
    "must be finite in float32, found 32 others: the largest scale is 1e": partial(
        a_weight, codes_EOI=torch.full((1, 2, 64), 0x7E, dtype=torch.uint8), codes="e4m3", scales=with_one(1e37)
    ),
    r"must be 2\^64 at most, found 2\^65": partial(a_weight, scales=with_one(192, torch.uint8), bits=4, codes="e2m1"),
    r"must be finite in float32, found 32 others: the largest scale is 3e\+38": partial(
        a_weight, scales=with_one(3e38)
    ),
    "found 1 times e4m3's NaN": partial(
        a_weight,
        codes_EOI=torch.tensor([1] * 63 + [255], dtype=torch.uint8).expand(1, 1, 64),
        codes="e4m3",
        scales=torch.ones(1, 1, 2),
    ),
    "codes of 4 bits must be below 16, found 16": partial(
        a_weight, codes_EOI=torch.full((1, 2, 64), 16, dtype=torch.uint8), bits=4
    ),
    "codes must be uint8": partial(a_weight, codes_EOI=torch.ones(1, 2, 64)),
    "group must be 0": partial(a_weight, group=48),
    r"scales .* must be torch.float32 of shape \(1, 2, 1\)": partial(a_weight, group=128),
    "zeros like scales": partial(a_weight, zeros=torch.ones(1, 2, 1, dtype=torch.uint8)),
    "zeros go with codes 'int'": partial(a_weight, zeros=torch.ones(1, 2, 2, dtype=torch.uint8), codes="e4m3"),
    "each of the 2 groups must have 32 of 64 columns": partial(a_weight, group_of=torch.zeros(1, 64)),
    "group_of with group 0": partial(a_weight, group=0, scales=torch.ones(1, 2, 1), group_of=torch.zeros(1, 64)),
    r"scales do not fit torch.float16: 1 of them, for instance \[100000.0\]": partial(
        scales_as, with_one(1e5), torch.float16
    ),
    r"1 of them, for instance \[9.99.*e-13\]": partial(scales_as, with_one(1e-12), torch.float16),
}


def test_a_large_scale_may_have_small_codes() -> None:
    q = a_weight(scales=with_one(191, torch.uint8), bits=4, codes="e2m1")
    assert dequantize_experts(q)[0, 1, 63] == 2.0**63


@pytest.mark.parametrize("words", BAD)
def test_what_no_checkpoint_should_hold(words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        BAD[words]()


def test_scales_in_another_type() -> None:
    assert torch.equal(
        scales_as(torch.tensor([0.0, 0.25, 3.0]).bfloat16(), torch.float16).float(), torch.tensor([0, 0.25, 3])
    )
