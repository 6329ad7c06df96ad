"""FP8 (E4M3) weights with a scale for each block, as DeepSeek and Qwen publish them: ``"quant_method": "fp8"``.

``weight = value x scale of its block``. Blocks at the edges may be smaller. Without ``weight_block_size`` one scale is
the whole weight's.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.errors import UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.quantised.quantisation import Group, Quantisation
from services.model.quantised.stored import SCALE_TYPES, Layout, Shape, Stored, groups_of

_POWERS = ("F8_E8M0", "U8")
"""Scales that are powers of two: a byte's value is 2 ** (byte - 127)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Fp8Block:
    """``rows`` and ``columns`` of a block; 0: one scale for the whole weight."""

    rows: int
    columns: int

    @property
    def label(self) -> str:
        return f"FP8 in blocks of {self.rows} x {self.columns}" if self.rows else "FP8 with one scale"

    @property
    def unread(self) -> tuple[str, ...]:
        return (".input_scale", ".output_scale", ".activation_scale")

    def problem(self, shape: Shape) -> str | None:
        del shape
        return None

    def stays(self, shape: Shape) -> bool:
        """Tools quantise whole blocks alone."""
        return bool(self.rows) and bool(shape[0] % self.rows or shape[1] % self.columns)

    def layouts(self, module: str, shape: Shape) -> tuple[Layout, ...]:
        scales: tuple[Shape, ...] = ((), (1,), (1, 1))
        if self.rows:
            scales = ((groups_of(shape[0], self.rows), groups_of(shape[1], self.columns)),)
        weight = Stored(name=f"{module}.weight", types=("F8_E4M3",), shapes=(shape,))
        types = (*SCALE_TYPES, *_POWERS)
        return tuple(
            {"codes": weight, "scales": Stored(name=f"{module}.{name}", types=types, shapes=scales)}
            for name in ("weight_scale_inv", "weight_scale")
        )


def read(config: ConfigFile) -> Quantisation:
    """Raises CheckpointError, UnsupportedModel."""
    kind = config.text("fmt", default="e4m3")
    if kind not in ("e4m3", "float8_e4m3fn"):
        raise UnsupportedModel(f'{config.path}: FP8 weights of "fmt" "{kind}" are not supported.', hint="e4m3 is.")
    if config.text("expert_dtype", default="fp8") != "fp8":
        raise UnsupportedModel(f"{config.path}: FP8 checkpoints with experts in FP4 are not supported.")
    left = config.strings("modules_to_not_convert") or config.strings("ignored_layers")
    return Quantisation(method="fp8", groups=(Group(format=_format(config)),), left=left, match="parts")


def _format(config: ConfigFile) -> Fp8Block:
    block = config.integers("weight_block_size")
    if not block:
        return Fp8Block(rows=0, columns=0)
    if len(block) != 2 or not all(block):
        raise config.wrong("weight_block_size", "the rows and columns of a block", list(block))
    return Fp8Block(rows=block[0], columns=block[1])
