"""Weights for a worker that joins, from a peer that holds them: over a lane between GPUs that is faster than a disk.

The worker does not trust the peer: it checks the weights against digests stored with the checkpoint (docs/adr/0017).
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
        """Fetch from ``seat`` and verify. Raises WeightsMismatch, or the errors of :func:`fetch`."""
        shapes = self._shapes(group)
        progress.begin(f"expert weights from {seat.title}", self._nbytes(shapes))
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
        log.log(level, "cannot load the weights of group %d from %s: %s", group.number, seat.title, error)

    def _nbytes(self, shapes: Shapes) -> int:
        return sum(math.prod(shape) for layer in shapes.values() for shape in layer.values()) * self._dtype.itemsize

    def _shapes(self, group: ShardGroup) -> Shapes:
        hidden, ffn = self._spec.hidden_size, self._spec.expert_ffn
        return {
            layer: {"gate_up": (len(ids), 2 * ffn, hidden), "down": (len(ids), hidden, ffn)}
            for layer, ids in group.experts.items()
        }


def given(weights: Mapping[int, ExpertWeights]) -> dict[int, tuple[tuple[int, ...], dict[str, Tensor]]]:
    """Return ``weights`` in the form of :class:`services.fabric.nccl.weights.WeightsGiver`."""
    return {
        layer: (held.expert_ids, {"gate_up": held.w_gate_up_E2FD, "down": held.w_down_EDF})
        for layer, held in weights.items()
    }


def _holders(table: RoutingTable, group: ShardGroup, myself: str) -> list[Seat]:
    """Return the other seats that hold exactly these experts, by number."""
    same = {known.number for known in table.groups if known.experts == group.experts}
    seats = [seat for seat in table.seats if seat.group in same and seat.worker != myself]
    return sorted(seats, key=lambda seat: seat.number)
