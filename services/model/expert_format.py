"""How experts' weights are held in memory: as numbers of the serving dtype, or quantised. Torch-free.

A :class:`HeldExperts` goes with the spec of a model that is served, and its label with the hash of the weights: workers
that hold experts in different ways do not answer for one another.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

from services.config import ExpertFormat

DENSE = "dense"
_RUN = 128
"""Columns of a run of the layout in 4 bits, and the largest group."""
_VECTOR = 16
"""Bytes that a kernel loads at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kind:
    """A form of :class:`moe_kernels.QuantisedWeight`: whole numbers of ``bits`` bits with a scale for each ``group``
    columns of a row; 0: for each row."""

    bits: int
    group: int
    scale_type: Literal["float16", "bfloat16", "float32"] = "float16"

    def __str__(self) -> str:
        return f"int{self.bits}-g{self.group}" if self.group else f"int{self.bits}-channel"

    @property
    def columns(self) -> int:
        """The number that must divide a matrix's columns."""
        return _VECTOR if self.bits == 8 and not self.group else _RUN

    def fits(self, columns: int) -> bool:
        return columns % self.columns == 0

    def nbytes(self, rows: int, columns: int) -> int:
        scales = columns // self.group if self.group else 1
        return rows * (columns * self.bits // 8 + scales * (4 if self.scale_type == "float32" else 2))


KINDS: Mapping[ExpertFormat, Kind] = {
    "int8": Kind(bits=8, group=0),
    "int4": Kind(bits=4, group=_RUN),
    "int4-channel": Kind(bits=4, group=0),
}
"""What each value of --expert-format rounds to. "auto" and "dense" round nothing."""


@dataclass(frozen=True, slots=True)
class HeldExperts:
    """``kinds``: layer -> how its experts are held; other layers' are dense. ``label`` names all of it, "" if all are
    dense, as they were before there was anything else."""

    kinds: tuple[tuple[int, Kind], ...] = ()
    label: str = ""

    def of(self, layer: int) -> Kind | None:
        return dict(self.kinds).get(layer)

    @property
    def title(self) -> str:
        """The label, for messages."""
        return self.label or DENSE


ALL_DENSE = HeldExperts()


def held(kinds: Mapping[int, Kind | None]) -> HeldExperts:
    """Return how experts are held, from the kind of each layer that has some."""
    found = tuple((layer, kind) for layer, kind in sorted(kinds.items()) if kind is not None)
    names = sorted({str(kind or DENSE) for kind in kinds.values()})
    if not found or len(names) == 1:
        return HeldExperts(found, names[0] if found else "")
    digest = blake2b(repr([(layer, str(kind)) for layer, kind in found]).encode(), digest_size=4).hexdigest()
    return HeldExperts(found, f"{'.'.join(names)}-{digest}")
