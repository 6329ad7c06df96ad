"""Weights for a worker that joins, from one that holds them: over a lane between GPUs that beats a disk.

Whoever gives them is not believed: they are held against digests that lie beside the checkpoint (docs/adr/0017).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.errors import ExpertMeshError, WeightsMismatch
from services.experts.verify import Verifier
from services.fabric.nccl.weights import Shapes, fetch
from services.fabric.tcp.connect import Facts
from services.model.digests import Digests
from services.model.experts import ExpertWeights
from services.model.progress import NoProgress, Progress
from services.model.spec import ModelSpec
from services.routing import RoutingTable, Seat, ShardGroup

log = logging.getLogger(__name__)

Tables = Callable[[], RoutingTable | None]
"""The newest routing table, if it can be read; blocks meanwhile."""


class WeightSources:
    """``facts.hello`` is the worker that joins."""

    def __init__(
        self, tables: Tables, facts: Facts, spec: ModelSpec, dtype: torch.dtype, digests: Callable[[], Digests | None]
    ) -> None:
        """``digests``: the checkpoint's, as this worker finds them. Without them nobody's weights are taken."""
        assert facts.lanes is not None
        self._tables, self._facts, self._spec, self._dtype = tables, facts, spec, dtype
        self._digests = digests

    def weights(
        self, group: ShardGroup, stopped: Callable[[], bool] = lambda: False, progress: Progress | None = None
    ) -> dict[int, ExpertWeights] | None:
        """As :func:`services.model.weights.load_experts`; None where no seat could give them, then read the disk.

        Args:
            stopped: asked between two tensors; once it says so, the result is None.
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
            log.info("weights of group %d came from seat %d", group.number, seat.number)
            return {
                layer: ExpertWeights(
                    expert_ids=group.experts[layer], w_gate_up_E2FD=tensors["gate_up"], w_down_EDF=tensors["down"]
                )
                for layer, tensors in found.items()
            }
        return None

    def _verified(
        self, seat: Seat, group: ShardGroup, digests: Digests, stopped: Callable[[], bool], progress: Progress
    ) -> dict[int, dict[str, Tensor]]:
        """Raises WeightsMismatch: the seat gives others than the checkpoint's; or as :func:`fetch`."""
        shapes = self._shapes(group)
        progress.begin(f"expert weights from seat {seat.number}", self._nbytes(shapes))
        with Verifier(digests, group.experts) as verifier:

            def take(layer: int, name: str, tensor: Tensor) -> None:
                verifier.take(layer, name, tensor)
                progress.advance(tensor.nbytes)

            found = fetch(seat, self._facts, group.experts, shapes, self._dtype, stopped, take)
            verifier.finish()
        return found

    def _note(self, group: ShardGroup, seat: Seat, error: Exception) -> None:
        self._facts.faults.ended_by(error)
        level = logging.ERROR if isinstance(error, WeightsMismatch) else logging.INFO
        log.log(level, "no weights of group %d from seat %d (%s): %s", group.number, seat.number, seat.worker, error)

    def _nbytes(self, shapes: Shapes) -> int:
        return sum(math.prod(shape) for layer in shapes.values() for shape in layer.values()) * self._dtype.itemsize

    def _shapes(self, group: ShardGroup) -> Shapes:
        hidden, ffn = self._spec.hidden_size, self._spec.expert_ffn
        return {
            layer: {"gate_up": (len(ids), 2 * ffn, hidden), "down": (len(ids), hidden, ffn)}
            for layer, ids in group.experts.items()
        }


def given(weights: Mapping[int, ExpertWeights]) -> dict[int, tuple[tuple[int, ...], dict[str, Tensor]]]:
    """What an :class:`ExpertServer` hands to those that join."""
    return {
        layer: (held.expert_ids, {"gate_up": held.w_gate_up_E2FD, "down": held.w_down_EDF})
        for layer, held in weights.items()
    }


def _holders(table: RoutingTable, group: ShardGroup, myself: str) -> list[Seat]:
    """Seats that hold exactly these experts, by number."""
    same = {known.number for known in table.groups if known.experts == group.experts}
    seats = [seat for seat in table.seats if seat.group in same and seat.worker != myself]
    return sorted(seats, key=lambda seat: seat.number)
