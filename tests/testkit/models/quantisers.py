"""Encoders of the checkpoint formats, written from their definitions: a weight in, its tensors and exact value out.

They share nothing with the server, and pack with shifts and sums of Python's whole numbers where it unpacks bytes. Each
rounds to the nearest code (RTN). Legend: N rows, K columns, G groups of columns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
FP8_MAX = 448.0


@dataclass(frozen=True, kw_only=True)
class Encoded:
    """``tensors``: the end of the name -> the tensor. ``value_NK`` is what these stand for, in float32."""

    tensors: Mapping[str, Tensor]
    value_NK: Tensor


Encoder = Callable[[Tensor], Encoded | None]
"""Returns None for a weight that the tool leaves as it is."""


@dataclass(frozen=True, kw_only=True)
class Format:
    """An encoder, and ``quantization_config``. ``experts_only``: the tool leaves all other layers as they are."""

    encode: Encoder
    config: Mapping[str, Any]
    experts_only: bool = False
    head: bool = False
    left: tuple[str, ...] = field(default=())


def packed(codes: Tensor, bits: int) -> Tensor:
    """int32 words of codes along the last dimension, the first code in the lowest bits; the last word is filled up."""
    each = 32 // bits
    rows = codes.long().reshape(-1, codes.shape[-1]).tolist()
    words = [
        [sum(code << (bits * i) for i, code in enumerate(row[at : at + each])) for at in range(0, len(row), each)]
        for row in rows
    ]
    signed = [[word - (1 << 32) if word >= 1 << 31 else word for word in row] for row in words]
    return torch.tensor(signed, dtype=torch.int32).reshape(*codes.shape[:-1], -1)


def group_order(columns: int, group: int, *, shuffled: bool = False, seed: int = 0) -> Tensor:
    order_K = torch.arange(columns) // group
    if not shuffled:
        return order_K
    return order_K[torch.randperm(columns, generator=torch.Generator().manual_seed(columns + seed))]


@dataclass(frozen=True)
class Affine:
    """Codes from 0 to 2 ** bits - 1, with zero points in the same range."""

    codes_NK: Tensor
    scales_NG: Tensor
    zeros_NG: Tensor
    order_K: Tensor

    def value(self) -> Tensor:
        zeros, scales = (values[:, self.order_K] for values in (self.zeros_NG, self.scales_NG))
        return (self.codes_NK.double() - zeros.double()).mul(scales.double()).float()


def affine(w_NK: Tensor, bits: int, order_K: Tensor, *, symmetric: bool, dtype: torch.dtype) -> Affine:
    groups, top = int(order_K.max()) + 1, 2**bits - 1
    by_group = [w_NK[:, order_K == group] for group in range(groups)]
    if symmetric:
        most = torch.stack([part.abs().amax(1) for part in by_group], dim=1)
        scales, zeros = (most / (top // 2)).to(dtype), torch.full(most.shape, (top + 1) // 2)
    else:
        low = torch.stack([part.amin(1).clamp(max=0) for part in by_group], dim=1)
        high = torch.stack([part.amax(1).clamp(min=0) for part in by_group], dim=1)
        scales = ((high - low) / top).to(dtype)
        zeros = (-low / scales.float()).round().clamp(0, top).long()
    codes = (w_NK / scales.float()[:, order_K]).round() + zeros[:, order_K]
    return Affine(codes.clamp(0, top).long(), scales, zeros, order_K)


def fp8_block(rows: int, columns: int, *, scale: torch.dtype = torch.float32) -> Encoder:
    def encode(w_NK: Tensor) -> Encoded:
        height, width = w_NK.shape
        down, across = -(-height // rows), -(-width // columns)
        scales = torch.empty(down, across)
        codes = torch.empty(w_NK.shape, dtype=torch.float8_e4m3fn)
        value = torch.empty(w_NK.shape)
        for i in range(down):
            for j in range(across):
                block = slice(i * rows, (i + 1) * rows), slice(j * columns, (j + 1) * columns)
                scales[i, j] = (w_NK[block].abs().max() / FP8_MAX).to(scale).float()
                codes[block] = (w_NK[block] / scales[i, j]).to(torch.float8_e4m3fn)
                value[block] = (codes[block].double() * scales[i, j].double()).float()
        return Encoded(tensors={".weight": codes, ".weight_scale_inv": scales.to(scale)}, value_NK=value)

    return encode


def fp8_tensor(w_NK: Tensor) -> Encoded:
    """One scale for the whole weight, and one of activations that changes no weight."""
    scale = w_NK.abs().max() / FP8_MAX
    codes = (w_NK / scale).to(torch.float8_e4m3fn)
    tensors = {".weight": codes, ".weight_scale": scale, ".input_scale": torch.tensor(0.5)}
    return Encoded(tensors=tensors, value_NK=(codes.double() * scale.double()).float())


def compressed_fp8(strategy: str) -> Encoder:
    """``strategy``: "tensor" or "channel"."""

    def encode(w_NK: Tensor) -> Encoded:
        most = w_NK.abs().amax(1, keepdim=True) if strategy == "channel" else w_NK.abs().max().reshape(1)
        scales = (most / FP8_MAX).bfloat16()
        codes = (w_NK / scales.float()).to(torch.float8_e4m3fn)
        value = (codes.double() * scales.double()).float()
        return Encoded(tensors={".weight": codes, ".weight_scale": scales}, value_NK=value)

    return encode


def compressed(
    bits: int,
    group: int | None,
    *,
    symmetric: bool = True,
    as_bytes: bool = False,
    sorts: bool = False,
    dtype: torch.dtype = torch.bfloat16,
) -> Encoder:
    """``group``: columns of one; None: one group per row."""

    def encode(w_NK: Tensor) -> Encoded:
        columns = w_NK.shape[1]
        order_K = group_order(columns, group or columns, shuffled=sorts)
        found, half = affine(w_NK, bits, order_K, symmetric=symmetric, dtype=dtype), 1 << (bits - 1)
        tensors = {".weight_scale": found.scales_NG}
        if as_bytes:
            tensors[".weight"] = (found.codes_NK - half).to(torch.int8)
        else:
            tensors[".weight_packed"] = packed(found.codes_NK, bits)
            tensors[".weight_shape"] = torch.tensor(w_NK.shape)
        if not symmetric:
            zeros = found.zeros_NG
            tensors[".weight_zero_point"] = (
                (zeros - half).to(torch.int8) if as_bytes else packed(zeros.t(), bits).t().contiguous()
            )
        if sorts:
            tensors[".weight_g_idx"] = order_K.int()
        return Encoded(tensors=tensors, value_NK=found.value())

    return encode


def gptq(
    bits: int, group: int, *, symmetric: bool = True, sorts: bool = False, v2: bool = False, order: bool = True,
    seed: int = 0,
) -> Encoder:  # fmt: skip
    """``group`` -1: all columns. ``order``: whether ``g_idx`` is there. ``seed``: of an order that ``sorts``."""

    def encode(w_NK: Tensor) -> Encoded | None:
        rows, columns = w_NK.shape
        if rows % (32 // bits) or columns % (32 // bits):
            return None
        order_K = group_order(columns, columns if group == -1 else group, shuffled=sorts, seed=seed)
        found = affine(w_NK, bits, order_K, symmetric=symmetric, dtype=torch.float16)
        zeros = packed(found.zeros_NG.t(), bits)
        if not v2:  # as GPTQModel does: 1 less in each place of a word, of which that of a 0 borrows
            zeros = zeros - sum(1 << shift for shift in range(0, 32, bits))
        tensors = {
            ".qweight": packed(found.codes_NK, bits).t().contiguous(),
            ".qzeros": zeros,
            ".scales": found.scales_NG.t().contiguous(),
        }
        if order:
            tensors[".g_idx"] = order_K.int()
        return Encoded(tensors=tensors, value_NK=found.value())

    return encode


def awq(group: int) -> Encoder:
    def encode(w_NK: Tensor) -> Encoded | None:
        rows, columns = w_NK.shape
        if rows % 8 or columns % group:
            return None
        found = affine(w_NK, 4, group_order(columns, group), symmetric=False, dtype=torch.float16)

        def words(values_XN: Tensor) -> Tensor:
            order = [0, 2, 4, 6, 1, 3, 5, 7]
            return packed(values_XN.unflatten(1, (-1, 8))[..., order].flatten(1), 4)

        tensors = {
            ".qweight": words(found.codes_NK.t()),
            ".qzeros": words(found.zeros_NG.t()),
            ".scales": found.scales_NG.t().contiguous(),
        }
        return Encoded(tensors=tensors, value_NK=found.value())

    return encode


def mxfp4(*, names: str = "blocks") -> Encoder:
    """``names``: those of gpt-oss ("blocks") or of compressed-tensors ("packed")."""

    def encode(w_NK: Tensor) -> Encoded | None:
        rows, columns = w_NK.shape
        if columns % 32:
            return None
        blocks = w_NK.reshape(rows, columns // 32, 32).double()
        exponent = torch.floor(torch.log2(blocks.abs().amax(-1))) - 2
        scaled = blocks / torch.pow(2.0, exponent)[..., None]
        distance = (scaled.abs()[..., None] - torch.tensor(E2M1, dtype=torch.float64)).abs()
        codes = distance.argmin(-1) + 8 * (scaled < 0)
        table = torch.tensor([*E2M1, *(-value for value in E2M1)], dtype=torch.float64)
        value = (table[codes] * torch.pow(2.0, exponent)[..., None]).reshape(rows, columns).float()
        data = (codes[..., 0::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        scales = (exponent + 127).to(torch.uint8)
        if names == "packed":
            return Encoded(tensors={".weight_packed": data.flatten(1), ".weight_scale": scales}, value_NK=value)
        return Encoded(tensors={"_blocks": data, "_scales": scales}, value_NK=value)

    return encode


def _compressed_config(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "dynamic": False, **weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
    }


def int_config(form: str, bits: int, group: int | None, *, symmetric: bool = True) -> dict[str, Any]:
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    return _compressed_config(form, num_bits=bits, symmetric=symmetric, **strategy)


def _float(form: str, **weights: Any) -> dict[str, Any]:
    return _compressed_config(form, **{"type": "float", "symmetric": True, **weights})


def _gptq_config(bits: int, group: int, **more: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": bits, "group_size": group, "desc_act": False, "sym": True, **more}


_FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3"}

FORMATS: dict[str, Format] = {
    "fp8-block": Format(encode=fp8_block(16, 8), config=_FP8 | {"weight_block_size": [16, 8]}),
    "fp8-block-remainder": Format(encode=fp8_block(24, 20), config=_FP8 | {"weight_block_size": [24, 20]}),
    "fp8-block-bf16-scales": Format(
        encode=fp8_block(128, 128, scale=torch.bfloat16), config=_FP8 | {"weight_block_size": [128, 128]}
    ),
    "fp8-tensor": Format(encode=fp8_tensor, config=_FP8 | {"activation_scheme": "static"}),
    "ct-int4-group": Format(encode=compressed(4, 8), config=int_config("pack-quantized", 4, 8)),
    "ct-int4-group-asym": Format(
        encode=compressed(4, 8, symmetric=False), config=int_config("pack-quantized", 4, 8, symmetric=False)
    ),
    "ct-int4-channel-asym": Format(
        encode=compressed(4, None, symmetric=False), config=int_config("pack-quantized", 4, None, symmetric=False)
    ),
    "ct-int8-channel": Format(encode=compressed(8, None), config=int_config("pack-quantized", 8, None)),
    "ct-int4-sorted": Format(encode=compressed(4, 8, sorts=True), config=int_config("pack-quantized", 4, 8)),
    "ct-int8-bytes": Format(encode=compressed(8, None, as_bytes=True), config=int_config("int-quantized", 8, None)),
    "ct-int8-bytes-asym": Format(
        encode=compressed(8, 8, symmetric=False, as_bytes=True),
        config=int_config("naive-quantized", 8, 8, symmetric=False),
    ),
    "ct-fp8-tensor": Format(
        encode=compressed_fp8("tensor"), config=_float("float-quantized", num_bits=8, strategy="tensor")
    ),
    "ct-fp8-channel": Format(
        encode=compressed_fp8("channel"), config=_float("naive-quantized", num_bits=8, strategy="channel")
    ),
    "ct-mxfp4": Format(
        encode=mxfp4(names="packed"),
        config=_float("mxfp4-pack-quantized", num_bits=4, strategy="group", group_size=32),
    ),
    "gptq-int4": Format(encode=gptq(4, 16), config=_gptq_config(4, 16, checkpoint_format="gptq")),
    "gptq-int4-remainder": Format(encode=gptq(4, 24, order=False), config=_gptq_config(4, 24)),
    "gptq-int4-act-order": Format(
        encode=gptq(4, 16, symmetric=False, sorts=True), config=_gptq_config(4, 16, desc_act=True, sym=False)
    ),
    "gptq-v2-asym": Format(
        encode=gptq(4, 8, symmetric=False, v2=True), config=_gptq_config(4, 8, sym=False, checkpoint_format="gptq_v2")
    ),
    "gptq-int8-row": Format(encode=gptq(8, -1), config=_gptq_config(8, -1)),
    "awq": Format(
        encode=awq(16),
        config={"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"},
    ),
    "mxfp4": Format(encode=mxfp4(), config={"quant_method": "mxfp4"}, experts_only=True),
}
