"""Weights for a worker that joins, from one that holds them: over a lane between GPUs that beats a disk."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from services.errors import ExpertMeshError
from services.fabric.nccl_weights import Shapes, fetch
from services.fabric.tcp_connect import Facts
from services.model.experts import ExpertWeights
from services.model.progress import NoProgress, Progress
from services.model.spec import ModelSpec
from services.routing import RoutingTable, Seat, ShardGroup

log = logging.getLogger(__name__)

Tables = Callable[[], RoutingTable | None]
"""The newest routing table, if it can be read; blocks meanwhile."""


class Donors:
    """``facts.hello`` is the worker that joins."""

    def __init__(self, tables: Tables, facts: Facts, spec: ModelSpec, dtype: torch.dtype) -> None:
        assert facts.lanes is not None
        self._tables, self._facts, self._spec, self._dtype = tables, facts, spec, dtype

    def weights(
        self, group: ShardGroup, stopped: Callable[[], bool] = lambda: False, progress: Progress | None = None
    ) -> dict[int, ExpertWeights] | None:
        """As :func:`services.model.weights.load_experts`; None where no seat could give them, then read the disk.

        Args:
            stopped: asked between two tensors; once it says so, the result is None.
        """
        table, shapes, progress = self._tables(), self._shapes(group), progress or NoProgress()
        for seat in [] if table is None else _holders(table, group, self._facts.hello.worker):
            progress.begin(f"expert weights from seat {seat.number}", self._nbytes(shapes))
            try:
                found = fetch(seat, self._facts, group.experts, shapes, self._dtype, stopped, progress.advance)
            except (ExpertMeshError, OSError) as error:
                log.info("no weights of group %d from seat %d: %s", group.number, seat.number, error)
                continue
            log.info("weights of group %d came from seat %d", group.number, seat.number)
            return {
                layer: ExpertWeights(
                    expert_ids=group.experts[layer], w_gate_up_E2FD=tensors["gate_up"], w_down_EDF=tensors["down"]
                )
                for layer, tensors in found.items()
            }
        return None

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
