"""Quantised weights: the layout by its definition, what packing keeps and what rounding costs, and bad input."""

from __future__ import annotations

import copy
import io
import pickle
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from moe_kernels import ArgumentError
from moe_kernels.quant.op import dequantize_experts, quantisation_error, quantize_experts
from moe_kernels.quant.weight import QuantisedWeight
from moe_kernels.reference import weight_value

FORMATS = [(8, 0), (8, 128), (4, 0), (4, 128)]
formats = pytest.mark.parametrize(("bits", "group"), FORMATS)


def random_weights(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def random_packed(bits: int, group: int, seed: int, experts: int = 2, out: int = 3, runs: int = 2) -> QuantisedWeight:
    """Any bytes and any scales: not what rounding would choose, but what the layout can hold."""
    generator = torch.Generator().manual_seed(seed)
    in_features = 128 * runs
    packed = torch.randint(0, 256, (experts, out, in_features * bits // 8), dtype=torch.uint8, generator=generator)
    scales = torch.randn(experts, out, runs if group else 1, generator=generator).half()
    return QuantisedWeight(packed=packed, scales=scales, bits=bits, group=group, in_features=in_features)


@formats
def test_every_column_is_where_the_layout_says(bits: int, group: int) -> None:
    q = random_packed(bits, group, seed=1)
    w_EOI = dequantize_experts(q, torch.float64)
    for expert, row in ((0, 2), (1, 0)):
        expected = [weight_value(q, expert, row, column) for column in range(256)]
        assert w_EOI[expert, row].tolist() == expected


@given(st.sampled_from(FORMATS), st.integers(0, 2**31), st.integers(1, 3), st.integers(1, 4), st.integers(1, 3))
@settings(max_examples=60, deadline=None)
def test_packing_is_undone_exactly(how: tuple[int, int], seed: int, experts: int, out: int, runs: int) -> None:
    """Codes times a power of two survive: their extreme makes that power the scale again."""
    bits, group = how
    lowest, highest, extreme = (-8, 7, -8) if bits == 4 else (-127, 127, 127)
    generator = torch.Generator().manual_seed(seed)
    w_EOI = torch.randint(lowest, highest + 1, (experts, out, 128 * runs), generator=generator).float()
    w_EOI.view(experts, out, runs, 128)[..., int(torch.randint(0, 128, (1,), generator=generator))] = extreme
    w_EOI *= 2.0 ** torch.randint(-12, 5, (experts, 1, 1), generator=generator)
    q = quantize_experts(w_EOI, bits, group)
    assert torch.equal(dequantize_experts(q), w_EOI)


@given(st.sampled_from(FORMATS), st.integers(0, 2**31), st.floats(-3, 3))
@settings(max_examples=60, deadline=None)
def test_quantising_twice_changes_nothing(how: tuple[int, int], seed: int, magnitude: float) -> None:
    w_EOI = random_weights(2, 3, 256, seed=seed) * 10**magnitude
    once = quantize_experts(w_EOI, *how)
    twice = quantize_experts(dequantize_experts(once), *how)
    assert torch.equal(once.packed, twice.packed)
    assert torch.equal(once.scales, twice.scales)


@given(st.sampled_from(FORMATS), st.integers(0, 2**31), st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
@settings(max_examples=60, deadline=None)
def test_error_stays_within_half_a_step(how: tuple[int, int], seed: int, dtype: torch.dtype) -> None:
    """In int4 within one step where the far side is clipped."""
    bits, group = how
    w_EOI = random_weights(2, 3, 256, seed=seed).to(dtype)
    q = quantize_experts(w_EOI, bits, group)
    step_EOG1 = q.scales.float().abs().unsqueeze(3)
    error_EOGC = (dequantize_experts(q) - w_EOI.float()).view(2, 3, q.scales.shape[2], -1).abs() / step_EOG1
    beyond = w_EOI.float().view_as(error_EOGC) / q.scales.float().unsqueeze(3) > 7.5
    inner = error_EOGC.masked_fill(beyond, 0) if bits == 4 else error_EOGC
    # float16's scale moves the extreme of int8 by up to 127 / 2048 of a step.
    assert inner.max() <= 0.5 + 1 / 16
    assert error_EOGC.max() <= 1 + 1 / 16


def test_halves_round_to_even() -> None:
    w_EOI = torch.zeros(1, 1, 128)
    w_EOI[0, 0, :5] = torch.tensor([-8.0, 0.5, 1.5, 2.5, -0.5])
    assert dequantize_experts(quantize_experts(w_EOI, 4, 128))[0, 0, :5].tolist() == [-8, 0, 2, 2, 0]


def test_the_extreme_has_code_minus_eight_whatever_its_sign() -> None:
    w_EOI = random_weights(2, 3, 256)
    one, other = quantize_experts(w_EOI, 4, 128), quantize_experts(-w_EOI, 4, 128)
    assert torch.equal(one.packed, other.packed)
    assert torch.equal(one.scales, -other.scales)
    extreme_EOG = w_EOI.view(2, 3, 2, 128).abs().amax(3)
    torch.testing.assert_close(one.scales.abs().float() * 8, extreme_EOG, atol=0, rtol=2**-11)


def test_example_of_the_docstring() -> None:
    w_EOI = torch.zeros(1, 1, 128)
    w_EOI[0, 0, :3] = torch.tensor([-4.0, 1.0, 2.2])
    q = quantize_experts(w_EOI, 4)
    assert q.scales.tolist() == [[[0.5]]]
    assert [byte & 15 for byte in q.packed[0, 0, :4].tolist()] == [0, 10, 12, 8]
    assert dequantize_experts(q)[0, 0, :4].tolist() == [-4, 1, 2, 0]


@formats
def test_groups_keep_an_outlier_to_themselves(bits: int, group: int) -> None:
    """So do rows, always."""
    w_EOI = random_weights(1, 2, 256)
    spoilt_EOI = w_EOI.clone()
    spoilt_EOI[0, 0, 200] = 1000
    same = dequantize_experts(quantize_experts(w_EOI, bits, group)) == dequantize_experts(
        quantize_experts(spoilt_EOI, bits, group)
    )
    assert same[0, 1].all()
    assert same[0, 0, :128].all() == (group == 128)


@formats
def test_zeros_and_tiny_values(bits: int, group: int) -> None:
    w_EOI = torch.zeros(3, 2, 256)
    w_EOI[1] = 1e-9
    w_EOI[2] = 3e-8
    q = quantize_experts(w_EOI, bits, group)
    assert (q.scales[0] == 0).all()
    values_EOI = dequantize_experts(q)
    assert values_EOI.isfinite().all()
    assert (values_EOI[0] == 0).all()
    assert (values_EOI - w_EOI).abs().max() <= 2**-25


@formats
def test_any_strides(bits: int, group: int) -> None:
    w_EOI = random_weights(2, 128, 256)
    transposed = w_EOI.transpose(1, 2).contiguous().transpose(1, 2)
    assert not transposed.is_contiguous()
    assert torch.equal(quantize_experts(transposed, bits, group).packed, quantize_experts(w_EOI, bits, group).packed)


def test_bytes_may_be_narrow() -> None:
    w_EOI = random_weights(2, 3, 48)
    assert (dequantize_experts(quantize_experts(w_EOI, 8, 0)) - w_EOI).abs().max() < w_EOI.abs().max() / 250


def test_error_statistics() -> None:
    """By hand: 16 errors of 0.25 among 128 values, of which 16 are 0.25, one is -8 and the rest 0; and an exact one."""
    w_EOI = torch.zeros(3, 1, 128)
    w_EOI[:2, 0, 0] = -8
    w_EOI[0, 0, 1:17] = 0.25
    stats = quantisation_error(w_EOI, quantize_experts(w_EOI, 4, 128))
    assert stats.max_abs_E.tolist() == [0.25, 0, 0]
    torch.testing.assert_close(stats.rms_E, torch.tensor([(1 / 128) ** 0.5, 0, 0]))
    torch.testing.assert_close(stats.relative_rms_E, torch.tensor([(1 / 65) ** 0.5, 0, 0]))
    torch.testing.assert_close(stats.snr_db_E, torch.tensor([18.12913, torch.inf, torch.inf]))


@pytest.mark.parametrize(("bits", "group", "least_db"), [(8, 0, 41), (8, 128, 43), (4, 0, 16.5), (4, 128, 19.5)])
def test_normal_weights_lose_what_is_expected(bits: int, group: int, least_db: float) -> None:
    w_EOI = random_weights(2, 64, 4096)
    snr_db_E = quantisation_error(w_EOI, quantize_experts(w_EOI, bits, group)).snr_db_E
    assert (snr_db_E > least_db).all()
    assert (snr_db_E < least_db + 2.5).all()


@formats
def test_a_shard_is_a_view(bits: int, group: int) -> None:
    q = random_packed(bits, group, seed=2, experts=4)
    shard = q.experts(1, 3)
    assert shard.shape == (2, 3, 256)
    assert torch.equal(dequantize_experts(shard), dequantize_experts(q)[1:3])
    assert shard.packed.data_ptr() == q.packed[1].data_ptr()
    assert q.nbytes == 4 * 3 * (256 * bits // 8 + 2 * q.scales.shape[2])
    assert torch.equal(q.to("cpu").packed, q.packed)


@pytest.mark.parametrize(
    ("shape", "dtype", "bits", "group", "words"),
    [
        ((2, 3, 256), torch.float32, 3, 128, "bits must be 4 or 8, found 3"),
        ((2, 3, 256), torch.float32, 4, 48, "group must be 0 .* or 128, found 48"),
        ((2, 3, 200), torch.float32, 4, 128, "I in multiples of 16, found I=200"),
        ((2, 3, 17), torch.float32, 8, 0, "I in multiples of 16, found I=17"),
        ((2, 3, 0), torch.float32, 8, 0, "I=0"),
        ((3, 256), torch.float32, 4, 128, r"weights must be \[E, O, I\] .* found torch.float32 of shape \(3, 256\)"),
        ((2, 3, 256), torch.float64, 4, 128, "found torch.float64"),
        ((2, 3, 256), torch.int8, 4, 128, "found torch.int8"),
    ],
)
def test_wrong_arguments_are_named(
    shape: tuple[int, ...], dtype: torch.dtype, bits: int, group: int, words: str
) -> None:
    with pytest.raises(ArgumentError, match=words):
        quantize_experts(torch.zeros(shape, dtype=dtype), bits, group)


@pytest.mark.parametrize(
    ("value", "words"), [(torch.nan, "NaN or infinite"), (-torch.inf, "NaN or infinite"), (1e7, "fit float16")]
)
def test_values_that_no_code_can_mean(value: float, words: str) -> None:
    w_EOI = random_weights(3, 2, 128)
    w_EOI[2, 1, 5] = value
    with pytest.raises(ArgumentError, match=f"expert 2.*{words}"):
        quantize_experts(w_EOI, 4, 128)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bits": 8}, "uint8 of shape"),
        ({"group": 0}, r"scales \[E, O, G\] must be torch.float16 of shape \(2, 3, 1\)"),
        ({"in_features": 128}, r"shape \(2, 3, 64\)"),
        ({"packed": torch.zeros(2, 3, 128, dtype=torch.int8)}, "must be torch.uint8"),
        ({"packed": torch.zeros(3, 128, dtype=torch.uint8)}, r"packed weights must be \[E, O"),
        ({"packed": torch.zeros(2, 3, 256, dtype=torch.uint8)[:, :, ::2]}, "contiguous"),
        ({"scales": torch.zeros(2, 3, 2, dtype=torch.uint8)}, "must be torch.float16"),
        ({"codes": "e4m3"}, "bits of 'e4m3' must be 8, found 4"),
        ({"codes": "e5m2"}, "codes must be one of .*found 'e5m2'"),
        ({"codes": "e2m1", "group": 32}, r"scales .* must be torch.uint8 of shape \(2, 3, 8\)"),
        ({"scale_rows": 2}, "rows must be multiples of scale_rows=2, found 3"),
        ({"scale_rows": 3}, r"scales .E, O / scale_rows, G. must be .* .2, 1, 2."),
        ({"scale_rows": 0}, "scale_rows must be at least 1"),
        ({"zeros": torch.zeros(2, 3, 2)}, "zeros like scales must be torch.uint8"),
        ({"order": torch.zeros(2, 256)}, r"order \[E, I\] must be torch.int32"),
        (
            {"scales": torch.zeros(2, 3, 2, dtype=torch.float16, device="meta")},
            "scales is on meta, packed weights on cpu",
        ),
    ],
)
def test_parts_must_fit_each_other(changes: dict[str, object], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        replace(random_packed(4, 128, seed=3), **changes)


def test_weights_that_want_gradients_leave_no_graph_behind() -> None:
    w_EOI = torch.nn.Parameter(random_weights(2, 3, 128))
    q = quantize_experts(w_EOI, 4)
    assert not q.scales.requires_grad
    assert not quantisation_error(w_EOI, q).rms_E.requires_grad


@pytest.mark.usefixtures("path")
def test_what_is_no_number_of_a_weight_is_named() -> None:
    q = quantize_experts(random_weights(3, 2, 128), 4)
    for words, call in {
        r"dtype must be one of .*\(3, 2, 128\), found torch.int32": lambda: dequantize_experts(q, torch.int32),
        r"go to a device, not to torch.float16": lambda: q.to(torch.float16),  # type: ignore[arg-type]
        r"experts 1\.\.4 are not all among the 3": lambda: q.experts(1, 5),
        r"experts -1\.\.2": lambda: q.experts(-1, 3),
        r"experts 2\.\.0": lambda: q.experts(2, 1),
        r"w must be \(3, 2, 128\) .*found .*\(3, 2, 256\)": lambda: quantisation_error(torch.zeros(3, 2, 256), q),
        r"w must be \(3, 2, 128\) on cpu .*on meta": lambda: quantisation_error(torch.ones(3, 2, 128).to("meta"), q),
    }.items():
        with pytest.raises(ArgumentError, match=words):
            call()


def test_copies_and_comparisons() -> None:
    q = quantize_experts(random_weights(3, 2, 128), 4)
    other = copy.deepcopy(q)
    assert torch.equal(pickle.loads(pickle.dumps(q)).packed, other.packed)
    assert q != other
    assert q in {q: 1}


@formats
def test_files_with_torchs_defaults(bits: int, group: int) -> None:
    """weights_only=True, that is; also for a shard, and inside of a checkpoint."""
    q = quantize_experts(torch.randn(3, 2, 256, generator=torch.Generator().manual_seed(0)), bits, group)
    file = io.BytesIO()
    torch.save({"layers": [q, q.experts(1, 3)]}, file)
    file.seek(0)
    for loaded, saved in zip(torch.load(file)["layers"], (q, q.experts(1, 3)), strict=True):
        assert (loaded.bits, loaded.group, loaded.shape) == (saved.bits, saved.group, saved.shape)
        assert torch.equal(loaded.packed, saved.packed)
        assert torch.equal(loaded.scales, saved.scales)


def test_what_is_loaded_is_checked() -> None:
    """Kernels read as far as the parts say they reach."""
    q = quantize_experts(torch.ones(3, 2, 256), 4)
    object.__setattr__(q, "in_features", 1024)
    with pytest.raises(ArgumentError, match="1024 columns in 4 bits"):
        pickle.loads(pickle.dumps(q))
