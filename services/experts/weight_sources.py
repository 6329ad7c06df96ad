"""Weights for a worker that joins, from a peer that holds them: over a lane between GPUs that is faster than a disk.

The worker does not trust the peer: it checks the weights against digests stored with the checkpoint (docs/adr/0017).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from moe_kernels import Weight
from services.errors import ExpertMeshError, WeightsMismatch
from services.experts.verify import Verifier
from services.fabric.nccl.weights import Form, Forms, fetch
from services.fabric.tcp.connect import Facts
from services.model.digests import Digests
from services.model.experts import DOWN, DOWN_BIAS, GATE_UP, GATE_UP_BIAS, ExpertWeights, tensors_of
from services.model.progress import NoProgress, Progress
from services.model.quantised_experts import empty_weight
from services.model.spec import ModelSpec
from services.routing import RoutingTable, Seat, ShardGroup

log = logging.getLogger(__name__)

Matrices = Mapping[str, Weight]
"""A layer's weights by the name of the matrix."""
_META = torch.device("meta")
Tables = Callable[[], RoutingTable | None]
"""Returns the newest routing table, or None if it cannot be read; blocks meanwhile."""


class WeightSources:
    """Finds peers that hold the weights of a group, and fetches them.

    Args:
        facts: how the worker that joins connects to seats, with lanes.
        digests: returns the checkpoint's digests; with None no peer's weights are used.
    """

    def __init__(
        self, tables: Tables, facts: Facts, spec: ModelSpec, dtype: torch.dtype, digests: Callable[[], Digests | None]
    ) -> None:
        assert facts.lanes is not None
        self._tables, self._facts, self._spec, self._dtype = tables, facts, spec, dtype
        self._digests = digests

    def weights(
        self, group: ShardGroup, stopped: Callable[[], bool] = lambda: False, progress: Progress | None = None
    ) -> dict[int, ExpertWeights] | None:
        """Return what :func:`services.model.weights.load_experts` returns; None where no peer has sent it.

        Args:
            stopped: called between two tensors; once it returns True the result is None.
        """
        table = self._tables()
        seats = [] if table is None else _holders(table, group, self._facts.hello.worker)
        if not seats or (digests := self._digests()) is None:
            return None
        for seat in seats:
            try:
                found = self._verified(seat, group, digests, stopped, progress or NoProgress())
            except (ExpertMeshError, OSError) as error:
                self._note(group, seat, error)
                continue
            log.info("loaded the weights of group %d from %s", group.number, seat.title)
            return found
        return None

    def _verified(
        self, seat: Seat, group: ShardGroup, digests: Digests, stopped: Callable[[], bool], progress: Progress
    ) -> dict[int, ExpertWeights]:
        """Fetch from ``seat`` and verify. Raises WeightsMismatch, or the errors of :func:`fetch`."""
        matrices = {layer: self._matrices(layer, len(ids)) for layer, ids in group.experts.items()}
        forms = {layer: _forms(planned) for layer, planned in matrices.items()}
        progress.begin(f"expert weights from {seat.title}", _nbytes(forms))
        with Verifier(digests, group.experts) as verifier:
            arriving = {layer: _Arriving(planned) for layer, planned in matrices.items()}

            def take(layer: int, name: str, tensor: Tensor) -> None:
                for matrix, weight in arriving[layer].take(name, tensor):
                    verifier.take(layer, matrix, weight)
                progress.advance(tensor.nbytes)

            fetch(seat, self._facts, group.experts, forms, stopped, take)
            verifier.finish()
        return {layer: whole.experts(group.experts[layer]) for layer, whole in arriving.items()}

    def _note(self, group: ShardGroup, seat: Seat, error: Exception) -> None:
        self._facts.faults.ended_by(error)
        level = logging.ERROR if isinstance(error, WeightsMismatch) else logging.INFO
        log.log(level, "cannot load the weights of group %d from %s: %s", group.number, seat.title, error)

    def _matrices(self, layer: int, count: int) -> Matrices:
        """Return weights without memory, of the form in which those of a layer come."""
        hidden, ffn, kind = self._spec.hidden_size, self._spec.expert_ffn, self._spec.experts.of(layer)
        shapes = {GATE_UP: (count, 2 * ffn, hidden), DOWN: (count, hidden, ffn)}
        biases = {GATE_UP_BIAS: (count, 2 * ffn), DOWN_BIAS: (count, hidden)} if self._spec.expert_bias else {}
        if kind is None:
            return {name: self._dense(*shape) for name, shape in (shapes | biases).items()}
        kinds = {GATE_UP: kind, DOWN: kind.folded}
        held = {name: empty_weight(kinds[name], shape, _META) for name, shape in shapes.items()}
        return held | {name: self._dense(*shape) for name, shape in biases.items()}

    def _dense(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=self._dtype, device=_META)


class _Arriving:
    """Weights of a layer, of which one tensor comes after the other. ``planned``: their form."""

    def __init__(self, planned: Matrices) -> None:
        self._planned = planned
        self._missing = {matrix: set(tensors_of(matrix, weight)) for matrix, weight in planned.items()}
        self._came: dict[str, Tensor] = {}
        self._whole: dict[str, Weight] = {}

    def take(self, name: str, tensor: Tensor) -> Iterator[tuple[str, Weight]]:
        """Yield the matrix, with its name, that ``tensor`` makes complete."""
        self._came[name] = tensor
        for matrix, missing in self._missing.items():
            if name in missing:
                missing.remove(name)
                if not missing:
                    self._whole[matrix] = weight = self._made(matrix)
                    yield matrix, weight

    def experts(self, expert_ids: tuple[int, ...]) -> ExpertWeights:
        """Return the layer once all of it has come."""
        biases = [self._whole.get(name) for name in (GATE_UP_BIAS, DOWN_BIAS)]
        assert all(isinstance(bias, Tensor | None) for bias in biases)
        return ExpertWeights(
            expert_ids=expert_ids,
            w_gate_up_E2FD=self._whole[GATE_UP],
            w_down_EDF=self._whole[DOWN],
            bias_gate_up_E2F=biases[0],  # type: ignore[arg-type]
            bias_down_ED=biases[1],  # type: ignore[arg-type]
        )

    def _made(self, matrix: str) -> Weight:
        planned = self._planned[matrix]
        if isinstance(planned, Tensor):
            return self._came[matrix]
        return planned.with_tensors({part: self._came[f"{matrix}.{part}"] for part in planned.tensors()})


def _forms(matrices: Matrices) -> dict[str, Form]:
    return {
        name: (tuple(tensor.shape), tensor.dtype)
        for matrix, weight in matrices.items()
        for name, tensor in tensors_of(matrix, weight).items()
    }


def _nbytes(forms: Forms) -> int:
    return sum(math.prod(shape) * dtype.itemsize for layer in forms.values() for shape, dtype in layer.values())


def given(weights: Mapping[int, ExpertWeights]) -> dict[int, tuple[tuple[int, ...], dict[str, Tensor]]]:
    """Return ``weights`` in the form of :class:`services.fabric.nccl.weights.WeightsGiver`."""
    return {layer: (held.expert_ids, held.tensors()) for layer, held in weights.items()}


def _holders(table: RoutingTable, group: ShardGroup, myself: str) -> list[Seat]:
    """Return the other seats that hold exactly these experts, by number."""
    same = {known.number for known in table.groups if known.experts == group.experts}
    seats = [seat for seat in table.seats if seat.group in same and seat.worker != myself]
    return sorted(seats, key=lambda seat: seat.number)
