"""MXFP4: ``"quant_method": "mxfp4"``, as OpenAI publishes gpt-oss, and compressed-tensors' "mxfp4-pack-quantized".

``weight = value x 2 ** (scale - 127)``. A value has 4 bits (E2M1): a sign and one of 0, 0.5, 1, 1.5, 2, 3, 4, 6; two
share a byte, the lower half first. A scale is a byte (E8M0) for 32 columns; 255 is no number.

gpt-oss keeps all experts of a layer in one tensor, with the rows of gate and up projection in turn. Weights of one
layer each have the same ending.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from services.model.configfile import ConfigFile
from services.model.quantised.quantisation import Group, Quantisation
from services.model.quantised.stored import Layout, Shape, Stored, uneven

COLUMNS = 32
_EXPERT = re.compile(r"(.+\.experts)\.(\d+)\.(gate_proj|up_proj|down_proj|w1|w2|w3)")
_ROWS_OF = {"gate_proj": 0, "w1": 0, "up_proj": 1, "w3": 1}


@dataclass(frozen=True, kw_only=True, slots=True)
class Mxfp4:
    """``packed``: in compressed-tensors' names. ``experts``: how many a layer has, in one tensor, otherwise."""

    packed: bool = False
    experts: int = 0

    @property
    def label(self) -> str:
        return "MXFP4"

    @property
    def unread(self) -> tuple[str, ...]:
        return (".weight_shape", ".input_scale") if self.packed else ()

    def problem(self, shape: Shape) -> str | None:
        return uneven("columns", shape[1], COLUMNS, "groups")

    def stays(self, shape: Shape) -> bool:
        return self.problem(shape) is not None

    def layouts(self, module: str, shape: Shape) -> tuple[Layout, ...]:
        rows, columns = shape
        if self.packed:
            codes, scales = (rows, columns // 2), (rows, columns // COLUMNS)
            return (_layout(f"{module}.weight_packed", f"{module}.weight_scale", codes, scales),)
        blocks = (rows, columns // COLUMNS, COLUMNS // 2)
        each = [
            _layout(f"{module}{end}_blocks", f"{module}{end}_scales", blocks, blocks[:2]) for end in ("", ".weight")
        ]
        found = _EXPERT.fullmatch(module)
        return tuple(each) if found is None or not self.experts else (_together(found, self.experts, blocks), *each)


def _layout(codes: str, scales: str, of_codes: Shape, of_scales: Shape) -> Layout:
    return {
        "codes": Stored(name=codes, types=("U8",), shapes=(of_codes,)),
        "scales": Stored(name=scales, types=("U8", "F8_E8M0"), shapes=(of_scales,)),
    }


def _together(found: re.Match[str], experts: int, blocks: Shape) -> Layout:
    """Return where a projection lies among those of all experts of its layer."""
    prefix, expert, part = found[1], int(found[2]), found[3]
    fused = part in _ROWS_OF
    name = f"{prefix}.{'gate_up_proj' if fused else 'down_proj'}"
    shape = (experts, blocks[0] * (2 if fused else 1), *blocks[1:])
    select = (expert, slice(_ROWS_OF[part], None, 2)) if fused else (expert,)

    def stored(end: str, at: Shape, *types: str) -> Stored:
        share = experts * (2 if fused else 1)
        return Stored(name=name + end, types=types, shapes=(at,), select=select, share=share)

    return {"codes": stored("_blocks", shape, "U8"), "scales": stored("_scales", shape[:-1], "U8", "F8_E8M0")}


def read(config: ConfigFile, experts: int) -> Quantisation:
    """Raises CheckpointError. ``experts`` is how many a layer has."""
    left = config.strings("modules_to_not_convert")
    group = Group(format=Mxfp4(experts=experts), targets=(r"re:.*\.experts\.\d+\..*",), others="either")
    return Quantisation(method="mxfp4", groups=(group,), left=left, match="parts")
