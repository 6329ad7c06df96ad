"""Which stored weights have a form that kernels take as it is. Torch-free; no tensor is read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from services.model.expert_format import Kind
from services.model.quantised.compressed import Compressed
from services.model.quantised.gptq import Gptq
from services.model.quantised.stored import Layout, LinearFormat, Shape

_GROUPS = (0, 128)
_SCALES: Mapping[str, Literal["float16", "bfloat16", "float32"]] = {
    "F16": "float16",
    "BF16": "bfloat16",
    "F32": "float32",
}


def stored_kind(scheme: LinearFormat, shape: Shape, parts: Layout, types: Mapping[str, str]) -> Kind | None:
    """Return the form in which a weight of ``shape`` can be held as it is stored; None if there is none.

    Args:
        types: the type of each of ``parts``.
    """
    group = _group(scheme, parts)
    if group not in _GROUPS or types["scales"] not in _SCALES:
        return None
    assert isinstance(scheme, Compressed | Gptq)
    kind = Kind(bits=scheme.bits, group=group, scale_type=_SCALES[types["scales"]])
    return kind if kind.fits(shape[1]) else None


def _group(scheme: LinearFormat, parts: Layout) -> int | None:
    """Return the columns that share a scale in whole numbers around a zero point in the middle; 0: all of a row."""
    if isinstance(scheme, Gptq) and scheme.symmetric and not scheme.sorts and scheme.bits in (4, 8):
        return scheme.group
    if isinstance(scheme, Compressed) and scheme.codes != "fp8" and not scheme.zeros and "order" not in parts:
        return {"tensor": 0, "channel": 0, "group": scheme.columns}.get(scheme.strategy)
    return None
