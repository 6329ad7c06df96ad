"""GPTQ: ``"quant_method": "gptq"``. Codes of 2, 4 or 8 bits, columns in groups that share a scale and a zero point.

``weight[n, k] = scale[g, n] x (code[k, n] - zero[g, n])`` with ``g = g_idx[k]``: in order of the columns, or sorted by
activations (act-order). Version 1 of the format stores zero points less 1, ``gptq_v2`` as they are.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from services.errors import UnsupportedModel
from services.model.configfile import ConfigFile
from services.model.quantised.quantisation import Group, Quantisation
from services.model.quantised.stored import SCALE_TYPES, WORD_BITS, Layout, Shape, Stored, groups_of, uneven

BITS = (2, 4, 8)
_V1 = ("gptq", "auto_round:gptq", "auto_round:auto_gptq")
_V2 = ("gptq_v2",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Gptq:
    """``group`` columns share a scale; 0: all of them. ``sorts``: the order of columns is the checkpoint's own.
    ``symmetric``: config.json promises the zero point in the middle."""

    bits: int
    group: int
    sorts: bool
    zero_offset: int
    symmetric: bool = False

    @property
    def label(self) -> str:
        return f"GPTQ int{self.bits}, {f'groups of {self.group}' if self.group else 'one group per row'}"

    @property
    def unread(self) -> tuple[str, ...]:
        return ()

    def problem(self, shape: Shape) -> str | None:
        """The last group may be smaller; words may not."""
        packed = WORD_BITS // self.bits
        return uneven("columns", shape[1], packed, "words") or uneven("rows", shape[0], packed, "words")

    def stays(self, shape: Shape) -> bool:
        return self.problem(shape) is not None

    def layouts(self, module: str, shape: Shape) -> tuple[Layout, ...]:
        rows, columns = shape
        packed, groups = WORD_BITS // self.bits, groups_of(columns, self.group or columns)

        def stored(name: str, *types: str, at: Shape, optional: bool = False) -> Stored:
            return Stored(name=f"{module}.{name}", types=types, shapes=(at,), optional=optional)

        return (
            {
                "codes": stored("qweight", "I32", at=(columns // packed, rows)),
                "zeros": stored("qzeros", "I32", at=(groups, rows // packed)),
                "scales": stored("scales", *SCALE_TYPES, at=(groups, rows)),
                "order": stored("g_idx", "I32", at=(columns,), optional=not self.sorts),
                # AutoGPTQ writes a bias of zeros for layers that have none
                "bias": stored("bias", *SCALE_TYPES, at=(rows,), optional=True),
            },
        )


def read(config: ConfigFile) -> Quantisation:
    """Raises CheckpointError, UnsupportedModel."""
    scheme = _format(config, {})
    changed = _overrides(config)
    groups = [Group(targets=(f"re:{pattern}",), format=_format(config, values)) for pattern, values in changed.items()]
    return Quantisation(
        method="gptq",
        groups=(*groups, Group(targets=_targets(config), format=scheme)),
        left=_left(config),
        match="names",
        heads=config.flag("lm_head", default=False),
    )


def _format(config: ConfigFile, values: dict[str, Any]) -> Gptq:
    own = ConfigFile(config.path, {**config.values, **values})
    version = own.text("checkpoint_format", "format", "packing_format", default="gptq").lower()
    if version not in (*_V1, *_V2):
        raise UnsupportedModel(
            f'{config.path}: GPTQ checkpoints of the format "{version}" are not supported.',
            hint=f"Supported are {', '.join((*_V1, *_V2))}.",
        )
    bits = own.count("bits")
    if bits not in BITS:
        raise UnsupportedModel(f"{config.path}: GPTQ codes of {bits} bits are not supported.", hint="2, 4 and 8 are.")
    return Gptq(
        bits=bits,
        group=group_size(own),
        sorts=own.flag("desc_act", default=False),
        zero_offset=1 if version in _V1 else 0,
        symmetric=own.flag("sym", default=False),
    )


def group_size(config: ConfigFile) -> int:
    """Return the columns of a group; 0 for -1, which is all of them."""
    return 0 if config.values.get("group_size") == -1 else config.count("group_size", default=128)


def _targets(config: ConfigFile) -> tuple[str, ...]:
    """``modules_in_block_to_quantize`` lists, in lists, what is quantised in each layer; without it all is."""
    inside = config.values.get("modules_in_block_to_quantize") or []
    if not isinstance(inside, list):
        raise config.wrong("modules_in_block_to_quantize", "a list of lists of names", inside)
    names = [name for item in inside for name in (item if isinstance(item, list) else [item])]
    if not all(isinstance(name, str) for name in names):
        raise config.wrong("modules_in_block_to_quantize", "a list of lists of names", inside)
    return tuple(rf"re:model\.layers\.\d+\.{re.escape(name)}$" for name in names) or ("Linear",)


def _overrides(config: ConfigFile) -> dict[str, dict[str, Any]]:
    """Return GPTQModel's ``dynamic``: a pattern -> settings of the layers that it matches, where they are quantised."""
    return {pattern.removeprefix("+:"): values for pattern, values in _dynamic(config).items() if pattern[:2] != "-:"}


def _left(config: ConfigFile) -> tuple[str, ...]:
    skipped = [f"re:{pattern[2:]}" for pattern in _dynamic(config) if pattern[:2] == "-:"]
    return (*skipped, *config.strings("modules_to_not_convert"))


def _dynamic(config: ConfigFile) -> dict[str, dict[str, Any]]:
    found = config.section("dynamic").values
    if not all(isinstance(values, dict) for values in found.values()):
        raise config.wrong("dynamic", "an object of patterns, with an object for each", dict(found))
    return dict(found)
