"""Expert weights in 8 or 4 bits: packed offline on any device, unpacked in registers by the kernels.

Symmetric and range-based, without calibration ("Who Says Elephants Can't Run", section 3.4): per output channel, or per
group of 128 input columns. :class:`QuantisedWeight` says the layout; ``dequant_triton`` is its reader inside kernels.
Legend: E experts, O output features (rows of an expert's matrix), I input features, G groups of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from moe_kernels import backend
from moe_kernels.arguments import (
    FLOATS,
    check_quantise,
    check_quantised,
    describe,
    is_integer,
    require,
    require_kind,
    require_tensors,
)

GROUP: Final = 128
"""Input columns of a group, and of a run of the int4 layout."""
EXTREME_CODE: Final = {4: -8, 8: 127}
"""The code of a group's value of largest magnitude.

-8 uses all 16 codes of int4: the step is extreme / -8, and the scale has the sign that brings the extreme there. On
normal weights that leaves 12 % less rms error than extreme / 7 with codes -7..7, at the price that a value near minus
the extreme is clipped to 7 steps, an error of up to one step instead of a half. In int8 the gain would be 0.8 %: there
codes -127..127 keep every error within half a step."""
SMALLEST_SCALE: Final = 2.0**-24
"""float16's smallest positive number."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisedWeight:
    """``w_EOI`` as codes and scales: ``w[e, o, i] = (code[e, o, i] - bias) * scales[e, o, i // 128 or 0]``.

    ``bits`` 8: ``packed`` uint8 ``[E, O, I]``, byte i = code of column i, bias 128 (codes 1..255).
    ``bits`` 4: ``packed`` uint8 ``[E, O, I / 2]``, bias 8 (codes 0..15), split halves: of each run of 128 columns
    c..c+127, byte j of the run's 64 has column c + j in its low nibble and column c + 64 + j in its high nibble. So a
    tile of bytes unpacks into two tiles of neighbouring columns, without any exchange between threads.
    ``scales`` float16 ``[E, O, G]``: G = I / 128 if ``group`` is 128, else 1 (``group`` 0: per channel). In int4 they
    may be negative. ``in_features``: I. ``torch.save`` and ``torch.load`` take it, also inside of other things.

    Example (a run shortened from 128 columns to 4): codes ``[3, 15, 8, 1]`` are the bytes ``[0x83, 0x1F]``; with scale
    0.5 they mean ``[-2.5, 3.5, 0.0, -3.5]``.

    Raises:
        ArgumentError: parts that do not fit each other.
    """

    packed: Tensor
    scales: Tensor
    bits: int
    group: int
    in_features: int

    def __post_init__(self) -> None:
        check_quantised(self.packed, self.scales, self.bits, self.group, self.in_features)

    @property
    def shape(self) -> tuple[int, int, int]:
        """``(E, O, I)``, as of the tensor that was quantised."""
        experts, out_features, _ = self.packed.shape
        return experts, out_features, self.in_features

    @property
    def device(self) -> torch.device:
        return self.packed.device

    @property
    def dtype_name(self) -> str:
        """The key of tile tables: "int8", "int4" (groups of 128), "int8_channel", "int4_channel"."""
        return f"int{self.bits}" + ("" if self.group else "_channel")

    @property
    def nbytes(self) -> int:
        """Of codes and scales."""
        return self.packed.nbytes + self.scales.nbytes

    def to(self, device: torch.device | str) -> QuantisedWeight:
        """Codes and scales on ``device``, themselves if they are there. Their dtypes are part of the layout."""
        fits = isinstance(device, (torch.device, str))
        require(fits, f"quantised weights of shape {self.shape} go to a device, not to {device!r}")
        return self._with(self.packed.to(device), self.scales.to(device))

    def experts(self, first: int, last: int) -> QuantisedWeight:
        """A view of experts ``first..last - 1``: a shard.

        Raises:
            ArgumentError: not all of them are here.
        """
        whole = is_integer(first) and is_integer(last)
        require(whole, f"experts of {self.shape} are counted by integers, found {first!r} and {last!r}")
        held = self.shape[0]
        require(0 <= first <= last <= held, f"experts {first}..{last - 1} are not all among the {held} of {self.shape}")
        return self._with(self.packed[first:last], self.scales[first:last])

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and what is loaded from a file pass the checks again: kernels trust them."""
        return _from_parts, (self.packed, self.scales, self.bits, self.group, self.in_features)

    def _with(self, packed: Tensor, scales: Tensor) -> QuantisedWeight:
        return _from_parts(packed, scales, self.bits, self.group, self.in_features)


def _from_parts(packed: Tensor, scales: Tensor, bits: int, group: int, in_features: int) -> QuantisedWeight:
    return QuantisedWeight(packed=packed, scales=scales, bits=bits, group=group, in_features=in_features)


# What torch.load may call by default, with weights_only=True.
torch.serialization.add_safe_globals([_from_parts])


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class QuantisationError:
    """What rounding did to each expert's matrix, float32 ``[E]`` each.

    ``relative_rms_E`` is rms(error) / rms(weight), ``snr_db_E`` = -20 log10 of it: infinite if nothing was lost. An
    expert of zeros has relative error 0.
    """

    max_abs_E: Tensor
    rms_E: Tensor
    relative_rms_E: Tensor
    snr_db_E: Tensor


@backend.eager
@torch.no_grad()
def quantize_experts(w_EOI: Tensor, bits: int, group: int = GROUP) -> QuantisedWeight:
    """Round ``w_EOI`` to ``bits`` with one scale per row (``group`` 0) or per 128 columns of a row (``group`` 128).

    The scale is rounded to float16 first and the codes are taken with the rounded one, half to even. So a value's error
    is half a step at most; beyond that only clipping costs (int4 as :data:`EXTREME_CODE` says, and groups whose scale
    float16 holds to few bits, below 6e-5). A group of zeros has scale 0. Offline: it reads values, so a GPU is waited
    for. Memory beyond the result: one expert in float32, a few times.

    Args:
        w_EOI: float32, bfloat16 or float16, any strides. I must be a multiple of 128, of 16 for ``bits`` 8 per channel.
        bits: 4 or 8.
        group: 0 or 128.

    Raises:
        ArgumentError: a shape, dtype, ``bits`` or ``group`` that is not offered; NaN, infinity, or values that overflow
            float16's scale.

    Example: one row ``[-4.0, 1.0, 2.2, 0, ...]``, 4 bits: scale -4 / -8 = 0.5, codes -8, 2, 4, 0: ``[-4, 1, 2, 0]``.
    """
    check_quantise(w_EOI, bits, group)
    experts, out_features, in_features = w_EOI.shape
    runs = in_features // group if group else 1
    device = w_EOI.device
    packed = torch.empty(experts, out_features, in_features * bits // 8, dtype=torch.uint8, device=device)
    scales = torch.empty(experts, out_features, runs, dtype=torch.float16, device=device)
    for expert, w_OI in enumerate(w_EOI):
        w_OGC = w_OI.float().reshape(out_features, runs, in_features // runs)
        require(bool(w_OGC.isfinite().all()), f"expert {expert} has values that are NaN or infinite")
        scales[expert] = _scales(w_OGC, bits)
        require(bool(scales[expert].isfinite().all()), f"expert {expert}: a scale does not fit float16")
        packed[expert] = _pack(_codes(w_OGC, scales[expert], bits).flatten(1), bits)
    return QuantisedWeight(packed=packed, scales=scales, bits=bits, group=group, in_features=in_features)


@backend.eager
def dequantize_experts(q: QuantisedWeight, dtype: torch.dtype = torch.float32) -> Tensor:
    """``w_EOI``: code x scale, exact in float32 (8 + 11 bits) and rounded once to another ``dtype``.

    Raises:
        ArgumentError: ``dtype`` is not float32, bfloat16, float16 or float64.
    """
    require_kind(isinstance(q, QuantisedWeight), "q must be a QuantisedWeight", q)
    floats = (*FLOATS, torch.float64)
    require(dtype in floats, f"dtype must be one of {floats} for weights of shape {q.shape}, found {dtype}")
    if backend.use_triton(q.packed) and dtype in FLOATS:
        from moe_kernels.quant import kernel as dequantize_triton

        with backend.device_of(q.packed):
            return dequantize_triton.launch(q, dtype)
    experts, out_features, in_features = q.shape
    w_EOI = torch.empty(q.shape, dtype=dtype, device=q.device)
    for expert in range(experts):
        codes_OI = _unpack(q.packed[expert], q.bits).float() - (1 << (q.bits - 1))
        codes_OGC = codes_OI.view(out_features, q.scales.shape[2], q.group or in_features)
        w_EOI[expert] = (codes_OGC * q.scales[expert].float().unsqueeze(2)).view(out_features, in_features)
    return w_EOI


@backend.eager
@torch.no_grad()
def quantisation_error(w_EOI: Tensor, q: QuantisedWeight) -> QuantisationError:
    """How far ``q`` is from the ``w_EOI`` it was made from, per expert.

    Raises:
        ArgumentError: different shapes or devices.
    """
    require_tensors(w=w_EOI)
    require_kind(isinstance(q, QuantisedWeight), "q must be a QuantisedWeight", q)
    fits = tuple(w_EOI.shape) == q.shape and w_EOI.device == q.device
    require(fits, f"w must be {q.shape} on {q.device} like q, found {describe(w_EOI)} on {w_EOI.device}")
    stats = torch.zeros(3, q.shape[0], dtype=torch.float64, device=w_EOI.device)
    for expert in range(q.shape[0]):
        w_OI = w_EOI[expert].double()
        error_OI = dequantize_experts(q.experts(expert, expert + 1))[0].double() - w_OI
        if w_OI.numel():
            stats[:, expert] = torch.stack([error_OI.abs().amax(), _rms(error_OI), _rms(w_OI)])
    max_abs_E, rms_E, weight_E = stats
    relative_E = torch.where(rms_E == 0, 0.0, rms_E / weight_E)
    return QuantisationError(
        max_abs_E=max_abs_E.float(),
        rms_E=rms_E.float(),
        relative_rms_E=relative_E.float(),
        snr_db_E=-20 * relative_E.log10().float(),
    )


def _rms(values: Tensor) -> Tensor:
    result: Tensor = values.square().mean().sqrt()
    return result


def _scales(w_OGC: Tensor, bits: int) -> Tensor:
    """float16 ``[O, G]``; tiny ones are raised to float16's smallest number, so that they still mean something."""
    extreme_OG = w_OGC.gather(2, w_OGC.abs().argmax(2, keepdim=True)).squeeze(2)
    exact_OG = extreme_OG / EXTREME_CODE[bits] if bits == 4 else extreme_OG.abs() / EXTREME_CODE[bits]
    return torch.where(exact_OG == 0, 0.0, exact_OG.abs().clamp_min(SMALLEST_SCALE).copysign(exact_OG)).half()


def _codes(w_OGC: Tensor, scales_OG: Tensor, bits: int) -> Tensor:
    """Codes with their bias added: 0..15 or 1..255."""
    step_OG1 = torch.where(scales_OG == 0, 1.0, scales_OG.float()).unsqueeze(2)
    half = 1 << (bits - 1)
    lowest = -half if bits == 4 else 1 - half
    return ((w_OGC / step_OG1).round().clamp(lowest, half - 1) + half).to(torch.uint8)


def _pack(codes_OI: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return codes_OI
    rows, columns = codes_OI.shape
    halves_ORHJ = codes_OI.view(rows, columns // GROUP, 2, GROUP // 2)
    return torch.bitwise_or(halves_ORHJ[:, :, 0], halves_ORHJ[:, :, 1] << 4).flatten(1)


def _unpack(packed_OB: Tensor, bits: int) -> Tensor:
    if bits == 8:
        return packed_OB
    rows, stored = packed_OB.shape
    bytes_ORJ = packed_OB.view(rows, stored // (GROUP // 2), GROUP // 2)
    halves_ORHJ = torch.stack([bytes_ORJ & 15, bytes_ORJ >> 4], dim=2)
    return halves_ORHJ.flatten(1)
