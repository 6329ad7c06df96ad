"""Layers of any size in any format: what is decoded is what was encoded, whatever the sizes of groups and pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.models import quantisers
from testkit.models.quantisers import Encoded, Encoder
from torch import Tensor
from torch.overrides import TorchFunctionMode

from services.model.dequantised import values
from services.model.dequantised.parts import Part
from services.model.quantised.awq import Awq
from services.model.quantised.compressed import Compressed
from services.model.quantised.fp8 import Fp8Block
from services.model.quantised.gptq import Gptq
from services.model.quantised.mxfp4 import Mxfp4
from services.model.quantised.stored import LinearFormat

MODULE = "layer"
sizes = st.integers(1, 70)
eights = st.integers(1, 9).map(lambda count: 8 * count)


def weight(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * 1000 + columns))


def parts_of(form: LinearFormat, encoded: Encoded) -> dict[str, Part]:
    rows, columns = encoded.value_NK.shape
    named = {f"{MODULE}{end}": tensor for end, tensor in encoded.tensors.items()}
    layouts = form.layouts(MODULE, (rows, columns))
    layout = max(layouts, key=lambda one: sum(stored.name in named for stored in one.values()))
    parts = {}
    for part, stored in layout.items():
        if stored.name in named:
            tensor = named.pop(stored.name)
            assert tuple(tensor.shape) in stored.shapes, f"{stored.name}: {tensor.shape} for {stored}"
            parts[part] = Part(tensor=tensor, name=stored.name, file=Path("file"))
        else:
            assert stored.optional, stored
    assert not named, "every tensor has a use"
    return parts


def decoded(form: LinearFormat, encoded: Encoded) -> Tensor:
    return values.dequantised(form, parts_of(form, encoded), tuple(encoded.value_NK.shape))


def assert_decodes(form: LinearFormat, encode: Encoder, rows: int, columns: int) -> None:
    encoded = encode(weight(rows, columns))
    assert encoded is not None
    assert form.problem((rows, columns)) is None
    assert torch.equal(decoded(form, encoded), encoded.value_NK)


@given(rows=sizes, columns=sizes, height=sizes, width=sizes)
def test_fp8_blocks(rows: int, columns: int, height: int, width: int) -> None:
    form = Fp8Block(rows=height, columns=width)
    assert_decodes(form, quantisers.fp8_block(height, width), rows, columns)


@given(bits=st.sampled_from([4, 8]), rows=sizes, group=sizes, groups=st.integers(1, 5), symmetric=st.booleans())
@pytest.mark.parametrize("as_bytes", [False, True])
def test_compressed_groups(as_bytes: bool, bits: int, rows: int, group: int, groups: int, symmetric: bool) -> None:
    """Also of rows and columns that leave the last word half empty."""
    encode = quantisers.compressed(bits, group, symmetric=symmetric, as_bytes=as_bytes)
    form = Compressed(
        codes="bytes" if as_bytes else "packed", bits=bits, strategy="group", columns=group, zeros=not symmetric
    )
    assert_decodes(form, encode, rows, group * groups)


@given(
    bits=st.sampled_from([2, 4, 8]),
    eighth=st.integers(1, 4),
    columns=st.integers(1, 6),
    group=st.integers(2, 70),
    symmetric=st.booleans(),
    sorts=st.booleans(),
    v2=st.booleans(),
)
def test_gptq(bits: int, eighth: int, columns: int, group: int, symmetric: bool, sorts: bool, v2: bool) -> None:
    """Also with a last group that is smaller, and zero points of 0, which borrow in version 1."""
    symmetric = symmetric and bits > 2
    encode = quantisers.gptq(bits, group, symmetric=symmetric, sorts=sorts, v2=v2)
    form = Gptq(bits=bits, group=group, sorts=sorts, zero_offset=0 if v2 else 1)
    assert_decodes(form, encode, 16 * eighth, 16 * columns)


@given(rows=eights, group=sizes, groups=st.integers(1, 5))
def test_awq(rows: int, group: int, groups: int) -> None:
    assert_decodes(Awq(group=group), quantisers.awq(group), rows, group * groups)


@given(rows=sizes, blocks=st.integers(1, 4), packed=st.booleans())
def test_mxfp4(rows: int, blocks: int, packed: bool) -> None:
    encode = quantisers.mxfp4(names="packed" if packed else "blocks")
    assert_decodes(Mxfp4(packed=packed), encode, rows, 32 * blocks)


def test_the_smallest_and_the_largest_scale_of_mxfp4() -> None:
    """2 ** -127 is below the normal numbers of float32; 2 ** 125 times 6 is the largest that a value may be."""
    scales = torch.tensor([[0], [1], [252]], dtype=torch.uint8)
    blocks = torch.full((3, 1, 16), 0x17, dtype=torch.uint8)
    found = decoded(Mxfp4(), Encoded(tensors={"_blocks": blocks, "_scales": scales}, value_NK=torch.empty(3, 32)))
    expected = [[6 * 2.0**power, 0.5 * 2.0**power] for power in (-127, -126, 125)]
    assert found[:, :2].tolist() == expected


@settings(max_examples=20)
@given(rows=sizes, columns=eights, at_once=st.integers(1, 600))
def test_rows_that_are_taken_some_at_a_time(rows: int, columns: int, at_once: int) -> None:
    with mock.patch.object(values, "_AT_ONCE", at_once):
        form = Compressed(codes="packed", bits=4, strategy="group", columns=8, zeros=True)
        assert_decodes(form, quantisers.compressed(4, 8, symmetric=False), rows, columns)


class Copied(TorchFunctionMode):
    """Notes what is copied into tensors of the device that stands in for a GPU."""

    def __init__(self) -> None:
        super().__init__()
        self.sources: list[Tensor] = []

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is Tensor.copy_ and args[0].device.type == "meta":
            self.sources.append(args[1])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_a_device_gets_few_rows_at_a_time_in_the_type_that_it_serves(dtype: torch.dtype) -> None:
    form, encoded = Fp8Block(rows=16, columns=16), quantisers.fp8_block(16, 16)(weight(70, 40))
    assert encoded is not None
    parts = parts_of(form, encoded)
    on_host, on_device = torch.empty(70, 40, dtype=dtype), torch.empty(70, 40, dtype=dtype, device="meta")
    with mock.patch.object(values, "_AT_ONCE", 400), Copied() as copied:
        values.dequantise(on_device, form, parts)
        values.dequantise(on_host, form, parts)
    assert torch.equal(on_host, encoded.value_NK.to(dtype))
    assert [len(source) for source in copied.sources] == [10] * 7
    assert {(source.dtype, source.device.type) for source in copied.sources} == {(dtype, "cpu")}


@pytest.mark.parametrize(
    ("form", "shape", "problem"),
    [
        (Gptq(bits=4, group=16, sorts=False, zero_offset=1), (8, 12), "12 columns do not divide into words of 8"),
        (Gptq(bits=4, group=16, sorts=False, zero_offset=1), (12, 8), "12 rows do not divide into words of 8"),
        (Awq(group=16), (8, 24), "24 columns do not divide into groups of 16"),
        (Awq(group=16), (12, 32), "12 rows do not divide into words of 8"),
        (Mxfp4(), (5, 48), "48 columns do not divide into groups of 32"),
        (Compressed(codes="packed", bits=4, strategy="group", columns=128), (5, 96), "into groups of 128"),
    ],
)
def test_sizes_that_do_not_fit(form: LinearFormat, shape: tuple[int, int], problem: str) -> None:
    assert problem in str(form.problem(shape))
