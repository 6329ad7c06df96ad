"""Which stored weights have a form that kernels take as it is. Torch-free; no tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from services.model.expert_format import GROUPS, Kind, ScaleType
from services.model.quantised.awq import Awq
from services.model.quantised.compressed import Compressed
from services.model.quantised.fp8 import Fp8Block
from services.model.quantised.gptq import Gptq
from services.model.quantised.mxfp4 import COLUMNS, Mxfp4
from services.model.quantised.stored import Layout, LinearFormat, Shape

_SCALES: Mapping[str, ScaleType] = {"F16": "float16", "BF16": "bfloat16"}
"""Types of scales that are kept; others become float32, which has all their values."""


def stored_kind(scheme: LinearFormat, shape: Shape, parts: Layout, types: Mapping[str, str]) -> Kind | None:
    """Return the form in which a weight of ``shape`` can be held as it is stored; None if there is none.

    It is ``ordered`` where config.json says so.

    Args:
        types: the type of each of ``parts``.
    """
    kind = _kind(scheme, parts)
    if kind is None or kind.group not in GROUPS or kind.problem(*shape):
        return None
    if kind.codes == "e2m1":
        return replace(kind, scale_type="uint8")
    return replace(kind, scale_type=_SCALES.get(types["scales"], "float32"))


def _kind(scheme: LinearFormat, parts: Layout) -> Kind | None:
    if isinstance(scheme, Mxfp4):
        return Kind(bits=4, group=COLUMNS, codes="e2m1")
    if isinstance(scheme, Fp8Block):
        return Kind(bits=8, group=scheme.columns, codes="e4m3", scale_rows=scheme.rows or 1)
    if isinstance(scheme, Awq):
        return Kind(bits=4, group=scheme.group, zeros=True)
    if isinstance(scheme, Gptq):
        ordered = scheme.sorts and bool(scheme.group)
        kind = Kind(bits=scheme.bits, group=scheme.group, zeros=not scheme.symmetric, ordered=ordered)
        return kind if scheme.bits in (4, 8) else None
    if not isinstance(scheme, Compressed):
        return None
    kind = _of_compressed(scheme)
    return replace(kind, ordered="order" in parts and bool(kind.group))


def _of_compressed(scheme: Compressed) -> Kind:
    group = scheme.columns if scheme.strategy in ("group", "block") else 0
    rows = scheme.rows if scheme.strategy == "block" else 1
    if scheme.codes == "fp8":
        return Kind(bits=8, group=group, codes="e4m3", scale_rows=rows)
    return Kind(bits=scheme.bits, group=group, scale_rows=rows, zeros=scheme.zeros)
