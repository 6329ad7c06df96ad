"""How a quantised linear layer lies on disk: its tensors, their types and shapes. Torch-free.

Legend: N rows (outputs) and K columns (inputs) of the weight, G groups of columns that share a scale.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

Shape = tuple[int, ...]

SCALE_TYPES = ("F32", "BF16", "F16")
WORD_BITS = 32
"""Codes of fewer than 8 bits are packed into words of so many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stored:
    """One tensor on disk. ``select`` picks what belongs to this linear layer where several share the tensor, and
    ``share`` is how many do. Without an ``optional`` one the layer is complete, though config.json may have it
    ``promised``."""

    name: str
    types: tuple[str, ...]
    shapes: tuple[Shape, ...]
    optional: bool = False
    promised: bool = False
    select: tuple[int | slice, ...] = ()
    share: int = 1

    def __str__(self) -> str:
        shapes = " or ".join(str(list(shape)) for shape in self.shapes)
        return f'"{self.name}" ({" or ".join(self.types)} {shapes})'


Layout = Mapping[str, Stored]
"""What each tensor is for -> the tensor."""


class LinearFormat(Protocol):
    """A way to store a weight of ``[N, K]``. ``module`` is the name of the layer: that of its weight, less ".weight".

    ``unread`` are ends of names of tensors that may lie beside and change no weight, such as scales of activations.
    """

    @property
    def label(self) -> str: ...

    @property
    def unread(self) -> tuple[str, ...]: ...

    def problem(self, shape: Shape) -> str | None:
        """Return why a weight of ``shape`` cannot be in this format."""
        ...

    def stays(self, shape: Shape) -> bool:
        """Return whether tools leave a weight of ``shape`` unquantised without saying so in config.json."""
        ...

    def layouts(self, module: str, shape: Shape) -> tuple[Layout, ...]:
        """Return the ways in which the tensors may be laid out. The first is the usual one."""
        ...


def groups_of(columns: int, group: int) -> int:
    """Return how many groups there are; the last may be smaller."""
    return -(-columns // group)


def uneven(what: str, size: int, part: int, into: str) -> str | None:
    """Return that ``size`` rows or columns do not divide ``into`` groups or words of ``part``; None if they do."""
    return f"{size} {what} do not divide into {into} of {part}" if size % part else None
