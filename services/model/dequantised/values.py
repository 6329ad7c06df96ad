"""Computes the weight that a quantised layer stands for, in float32, by its format's definition.

Rows are taken some at a time, so that no more than the codes, the result and 4 MiB are in memory at once.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from services.errors import CheckpointError
from services.model.dequantised.formats import scaled
from services.model.dequantised.parts import HINT, Part, Parts, Scaled
from services.model.quantised.stored import LinearFormat, Shape

_AT_ONCE = 1 << 20
"""Elements of a piece of rows."""


def dequantised(scheme: LinearFormat, parts: Parts, shape: Shape) -> Tensor:
    """Return the weight ``[N, K]`` in float32. Raises CheckpointError: as by :func:`pieces`."""
    values_NK = torch.empty(shape, dtype=torch.float32)
    dequantise(values_NK, scheme, parts)
    return values_NK


def dequantise(target_NK: Tensor, scheme: LinearFormat, parts: Parts) -> None:
    """Fill ``target_NK`` with the weight, rounded to its dtype before it leaves the host.

    Raises:
        CheckpointError: as by :func:`pieces`.
    """
    for first, piece in pieces(scheme, parts, tuple(target_NK.shape)):
        target_NK[first : first + len(piece)].copy_(piece.to(target_NK.dtype))


def pieces(scheme: LinearFormat, parts: Parts, shape: Shape) -> Iterator[tuple[int, Tensor]]:
    """Yield rows of the weight in float32, with the number of the first: until the next are asked for.

    Raises:
        CheckpointError: a scale, a zero point's place or an order is not as the format has it, or a value of the weight
            is no finite number.
    """
    weight = scaled(scheme, parts, shape)
    step = max(1, _AT_ONCE // max(1, shape[1]))
    space = torch.empty((min(step, shape[0]), shape[1]), dtype=torch.float32)
    for first in range(0, shape[0], step):
        piece = space[: shape[0] - first]
        _fill(piece, weight, slice(first, first + len(piece)))
        if piece.numel() and not all(map(Tensor.isfinite, piece.aminmax())):  # quicker than asking each value
            raise _not_finite(parts["codes"], piece, first)
        yield first, piece


def _fill(piece: Tensor, weight: Scaled, rows: slice) -> None:
    codes = weight.codes_NK[rows]
    if weight.table is None:
        piece.copy_(codes)
    else:
        torch.index_select(weight.table, 0, codes.reshape(-1).int(), out=piece.view(-1))
    if weight.zeros_NG is not None:
        piece.sub_(_by_column(weight.zeros_NG[rows].float(), weight.group_K))
    piece.mul_(_by_column(weight.scales_NG[rows], weight.group_K))


def _by_column(values_NG: Tensor, group_K: Tensor) -> Tensor:
    return values_NG if values_NG.shape[1] == 1 else values_NG.index_select(1, group_K)


def _not_finite(codes: Part, piece: Tensor, first: int) -> CheckpointError:
    row, column = (int(index) for index in (~piece.isfinite()).nonzero()[0])
    return CheckpointError(
        f'{codes.file}: "{codes.name}" times its scales must be finite, found {float(piece[row, column])} in row '
        f"{first + row}, column {column}.",
        hint=HINT,
    )
