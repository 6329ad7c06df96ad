"""AWQ in the packing order of its GEMM kernels: ``"quant_method": "awq"``. Codes of 4 bits with zero points.

``weight[n, k] = scale[g, n] x (code[k, n] - zero[g, n])`` with ``g = k // group``. A word holds eight rows' codes; from
its lowest bits on these are of rows 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from dataclasses import dataclass

from services.errors import UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.quantised.gptq import group_size
from services.model.quantised.quantisation import Group, Quantisation
from services.model.quantised.stored import SCALE_TYPES, WORD_BITS, Layout, Shape, Stored, uneven

_BITS = 4
_PACKED = WORD_BITS // _BITS
_VERSIONS = ("gemm", "auto_round:auto_awq", "auto_round:awq")


@dataclass(frozen=True, kw_only=True, slots=True)
class Awq:
    """``group`` columns share a scale; 0: all of them."""

    group: int

    @property
    def label(self) -> str:
        return f"AWQ int{_BITS}, {f'groups of {self.group}' if self.group else 'one group per row'}"

    @property
    def unread(self) -> tuple[str, ...]:
        return ()

    def problem(self, shape: Shape) -> str | None:
        grouped = uneven("columns", shape[1], self.group, "groups") if self.group else None
        return grouped or uneven("rows", shape[0], _PACKED, "words")

    def stays(self, shape: Shape) -> bool:
        return self.problem(shape) is not None

    def layouts(self, module: str, shape: Shape) -> tuple[Layout, ...]:
        rows, columns = shape
        groups = columns // self.group if self.group else 1

        def stored(name: str, *types: str, at: Shape) -> Stored:
            return Stored(name=f"{module}.{name}", types=types, shapes=(at,))

        return (
            {
                "codes": stored("qweight", "I32", at=(columns, rows // _PACKED)),
                "zeros": stored("qzeros", "I32", at=(groups, rows // _PACKED)),
                "scales": stored("scales", *SCALE_TYPES, at=(groups, rows)),
            },
        )


def read(config: ConfigFile) -> Quantisation:
    """Raises CheckpointError, UnsupportedModel."""
    version = config.text("version", "checkpoint_format", "format", "packing_format", default="gemm").lower()
    if version not in _VERSIONS:
        raise UnsupportedModel(
            f'{config.path}: AWQ checkpoints of the version "{version}" are not supported.', hint="gemm is."
        )
    bits = config.count("bits", "w_bit", default=_BITS)
    if bits != _BITS:
        raise UnsupportedModel(f"{config.path}: AWQ codes of {bits} bits are not supported.", hint=f"{_BITS} are.")
    group = config.values.get("group_size", config.values.get("q_group_size"))
    own = ConfigFile(config.path, {**config.values, "group_size": group})
    left = config.strings("modules_to_not_convert")
    return Quantisation(method="awq", groups=(Group(format=Awq(group=group_size(own))),), left=left, match="parts")
