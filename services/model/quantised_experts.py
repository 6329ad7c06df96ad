"""Loads experts that are held quantised, some at a time: those stored so as they are, others rounded here.

Beyond the result, memory holds a few experts in float32: as many as :data:`STAGED_BYTES`, on a GPU as
:data:`STAGED_GPU_BYTES` hold, one at least, and what rounding one of them takes.
Legend: E experts, F expert width, D hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import islice

import torch
from torch import Tensor

from moe_kernels import ArgumentError, QuantisedWeight, fold_order, quantize_experts, stack_rows
from services.errors import CheckpointError
from services.model.expert_format import Kind
from services.model.host_memory import empty
from services.model.names import FfnNames
from services.model.tensor_reads import Place
from services.model.weight_source import Tensors

STAGED_BYTES = 64 << 20
"""Experts that are read at a time, in float32: enough for all threads that read to have work."""
STAGED_GPU_BYTES = 512 << 20
"""The same on a GPU, where each time costs pinned buffers, a stream for each thread and an emptied cache."""


def empty_weight(kind: Kind, shape: tuple[int, int, int], device: torch.device) -> QuantisedWeight:
    """Return a weight ``[E, O, I]`` of ``kind`` with any contents; on the device "meta" without memory."""
    planned = QuantisedWeight.empty(
        shape,
        bits=kind.bits,
        group=kind.group,
        codes=kind.codes,
        scale_rows=kind.scale_rows,
        zeros=kind.zeros,
        ordered=kind.ordered,
        scale_type=getattr(torch, kind.scale_type),
        device="meta",
    )
    if device.type == "meta":
        return planned
    parts = planned.tensors().items()
    return planned.with_tensors({name: empty(part.shape, part.dtype, device) for name, part in parts})


class QuantisedLoader:
    """Loads layers of one model; what is staged on the way is shared by all of them.

    Args:
        width: F.
        dtype: in which they are served.
        advance: called with the bytes that were read.
    """

    def __init__(
        self,
        tensors: Tensors,
        *,
        hidden: int,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
        advance: Callable[[int], None],
    ) -> None:
        self._tensors, self._hidden, self._width, self._dtype = tensors, hidden, width, dtype
        self._device, self._advance = device, advance
        staged = STAGED_GPU_BYTES if device.type == "cuda" else STAGED_BYTES
        self._at_once = max(1, staged // (4 * 3 * hidden * width))
        self._staged: tuple[Tensor, Tensor] | None = None

    def load(self, kind: Kind, w_in: QuantisedWeight, w_down: QuantisedWeight, ffns: Sequence[FfnNames]) -> None:
        """Fill ``w_in`` and ``w_down``, the experts of one layer, held in ``kind``.

        Raises:
            CheckpointError: there is something wrong with them, or ``kind`` cannot hold their values.
        """
        numbers: list[int] = []
        for slot, ffn in enumerate(ffns):
            names = (ffn.gate, ffn.up, ffn.down)
            if all(self._tensors.kind(name) == kind for name in names):
                self._take(w_in, w_down, slot, ffn)
                self._advance(self._tensors.nbytes(names))
            else:
                numbers.append(slot)
        for slots in _pieces(numbers, self._at_once):
            self._round(kind, w_in, w_down, slots, [ffns[slot] for slot in slots])

    def _take(self, w_in: QuantisedWeight, w_down: QuantisedWeight, slot: int, ffn: FfnNames) -> None:
        gate, up, down = (self._tensors.read_stored(name, self._dtype) for name in (ffn.gate, ffn.up, ffn.down))
        try:
            both, down, _ = fold_order(stack_rows(gate, up), down)
        except ArgumentError as error:
            raise CheckpointError(
                f'"{ffn.gate}" and "{ffn.up}" must have their columns in the same order for the layer to be held as it '
                f"is stored: {error}.",
                hint="Serve it with --expert-format dense.",
            ) from error
        assert isinstance(both, QuantisedWeight)
        _put(w_in, slot, both)
        _put(w_down, slot, down)

    def _round(
        self,
        kind: Kind,
        w_in: QuantisedWeight,
        w_down: QuantisedWeight,
        slots: Sequence[int],
        ffns: Sequence[FfnNames],
    ) -> None:
        in_E2FD, down_EDF = self._staging()
        places = []
        for index, ffn in enumerate(ffns):
            places.append(Place(name=ffn.gate, target=in_E2FD[index, : self._width]))
            places.append(Place(name=ffn.up, target=in_E2FD[index, self._width :]))
            places.append(Place(name=ffn.down, target=down_EDF[index]))
        self._tensors.fill(places, self._device, self._advance)
        for index, slot in enumerate(slots):
            part = slice(index, index + 1)
            try:
                for weight, staged in ((w_in, in_E2FD[part]), (w_down, down_EDF[part])):
                    _round_into(weight.experts(slot, slot + 1), staged, kind)
            except ArgumentError as error:
                raise _unfit(kind, places[3 * index : 3 * index + 3], error) from error

    def _staging(self) -> tuple[Tensor, Tensor]:
        """Return memory for experts in float32, whose values do not depend on the serving dtype."""
        if self._staged is None:
            width, hidden = self._width, self._hidden
            shapes = (self._at_once, 2 * width, hidden), (self._at_once, hidden, width)
            self._staged = tuple(empty(shape, torch.float32, self._device) for shape in shapes)  # type: ignore[assignment]
        assert self._staged is not None
        return self._staged


def _round_into(weight: QuantisedWeight, staged: Tensor, kind: Kind) -> None:
    form = {"codes": kind.codes, "scale_rows": kind.scale_rows, "zeros": kind.zeros}
    if weight.order is not None:
        weight.order.copy_(torch.arange(weight.in_features))
    quantize_experts(staged, kind.bits, kind.group, **form, into=weight.without_order())  # type: ignore[arg-type]


def _put(weight: QuantisedWeight, slot: int, expert: QuantisedWeight) -> None:
    parts = expert.tensors()
    for name, part in weight.experts(slot, slot + 1).tensors().items():
        part.copy_(parts[name])


def _pieces(slots: Sequence[int], most: int) -> Iterator[list[int]]:
    left = iter(slots)
    while piece := list(islice(left, most)):
        yield piece


def _unfit(kind: Kind, places: Sequence[Place], error: ArgumentError) -> CheckpointError:
    """Return which of one expert's tensors ``kind`` cannot hold."""
    worst = max(places, key=lambda place: float(place.target.abs().nan_to_num(torch.inf, torch.inf).max()))
    most = float(worst.target.abs().max())
    return CheckpointError(
        f'Tensor "{worst.name}" cannot be held in {kind}: expected finite values whose scale float16 holds, found '
        f"{most:g} ({error}).",
        hint="Serve it with --expert-format dense.",
    )
