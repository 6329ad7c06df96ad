"""From a shard group to experts that answer: weights read, server listening."""

from __future__ import annotations

import logging
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.config import Settings
from services.experts.weight_sources import Tables, WeightSources, given
from services.fabric.device_counters import beside
from services.fabric.faults import Faults
from services.fabric.nccl.lanes import Lanes, LaneServer, lanes_for
from services.fabric.nccl.weights import WeightsGiver
from services.fabric.secret import read_secret
from services.fabric.shared_memory.open_memory import memory_for
from services.fabric.shared_memory.server import WAIT_S, Limits, SharedMemoryServer
from services.fabric.tcp.compute import Compute
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.frames import MAX_BYTES, NAMES
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.peer import Timing as ConnectionTiming
from services.fabric.tcp.server import ExpertServer
from services.fabric.tcp.tls import server_tls
from services.model.digests import read_digests
from services.model.experts import ExpertShard, ExpertWeights
from services.model.progress import Stoppable, loading_progress
from services.model.spec import ModelSpec
from services.model.weights import load_experts
from services.routing import ShardGroup

log = logging.getLogger(__name__)

WAIT_BESIDE_S = 0.5
"""For rows through shared memory, on a GPU that attention has kernels to load on: that waits, too."""
JOIN_ROWS = 2048
"""Most rows of a call for several attention workers; more gain little by it."""
INBOX_ROWS = 65_536
"""Rows that may wait; then the server stops reading."""
MAX_WARM_ROWS = 4096
"""Larger calls take kernels of the same shapes."""


@dataclass(frozen=True, slots=True)
class TcpServing:
    """A group behind an :class:`ExpertServer`."""

    group: ShardGroup
    server: ExpertServer
    symm: SharedMemoryServer | None = None
    slots: int = 1
    """Experts that a row chooses."""
    lanes: Lanes | None = None

    @property
    def port(self) -> int:
        return self.server.address[1]

    @property
    def rows_in_flight(self) -> int:
        return self.server.rows_in_flight

    @property
    def busy_s(self) -> float:
        return self.server.counts.seconds + self._shared_s()[0]

    @property
    def joined_steps(self) -> int:
        """Steps by shared memory that ran with those of another attention worker as one."""
        return self.symm.joined_steps() if self.symm else 0

    @property
    def waited_s(self) -> float:
        return self.server.waited_s + self._shared_s()[1]

    def _shared_s(self) -> tuple[float, float]:
        return self.symm.occupied() if self.symm else (0.0, 0.0)

    @property
    def failure(self) -> BaseException | None:
        return self.server.failure

    def rows(self) -> dict[int, tuple[int, ...]]:
        counted = self.server.counts.expert_rows
        shared = self.symm.rows() if self.symm else {}
        return {
            layer: tuple(
                (counted[layer][expert] if layer in counted else 0) + (shared[layer][expert] if layer in shared else 0)
                for expert in experts
            )
            for layer, experts in self.group.experts.items()
        }

    def layer_rows(self) -> dict[int, int]:
        """Rows computed so far, by layer. Through shared memory pairs are counted: so many make a row."""
        rows = dict(self.server.counts.layer_rows)
        for layer, pairs in self.symm.rows().items() if self.symm else ():
            rows[layer] = rows.get(layer, 0) + sum(pairs) // self.slots
        return rows

    def drain(self, seconds: float) -> bool:
        answered = self.server.drain(seconds)
        if self.lanes is not None:
            self.lanes.wait_ended()
        return answered


class Loader:
    """Reads groups of one checkpoint and serves them; calling it blocks for as long as that takes.

    ``beside_attention``: an attention worker computes on the same device, in this process.
    """

    def __init__(
        self,
        settings: Settings,
        spec: ModelSpec,
        *,
        worker: str,
        dtype: torch.dtype,
        device: torch.device,
        version: str,
        tables: Tables = lambda: None,
        beside_attention: bool = False,
    ) -> None:
        assert settings.model is not None, "load_settings requires it of this role"
        assert settings.fabric_secret_file is not None, "load_settings requires it of this role"
        self._settings, self._spec, self._worker = settings, spec, worker
        self._dtype, self._device, self._version = dtype, device, version
        self._model = settings.model
        self._secret = read_secret(settings.fabric_secret_file)
        self._tls = server_tls(settings.fabric_tls_cert, settings.fabric_tls_key)
        self._lanes = lanes_for(settings.fabric_lane, device)
        self._tables = tables
        self.faults = Faults()
        self._beside = beside_attention

    def __call__(self, group: ShardGroup, seat: int, stopped: threading.Event) -> TcpServing:
        """
        Raises:
            LoadStopped: ``stopped`` was set.
            CheckpointError: the weights are damaged or not there.
            PortInUse: another process listens on the port.
        """
        with beside(self._device) if self._beside and self._device.type == "cuda" else nullcontext():
            return self._served(group, seat, stopped)

    def _served(self, group: ShardGroup, seat: int, stopped: threading.Event) -> TcpServing:
        weights = self._given(group, stopped) or self._read(group, stopped)
        shard = ExpertShard(weights, num_experts=self._spec.num_experts)
        if self._device.type == "cuda":
            _warm(shard, group, self._spec.hidden_size, self._dtype, self._device)
        symm = self._shared_memory(group, shard)
        server = ExpertServer(
            shard.forward if self._device.type == "cpu" else _on(self._device, shard.forward, aside=self._beside),
            experts=group.experts,
            hello=self._hello(seat),
            secret=self._secret,
            host=self._settings.host,
            port=self._settings.fabric_port,
            inbox_rows=INBOX_ROWS,
            tls=self._tls,
            extensions=self._extensions(weights, symm),
            faults=self.faults,
        )
        server.start()
        return TcpServing(group, server, symm, self._spec.top_k, self._lanes)

    def _extensions(self, weights: dict[int, ExpertWeights], symm: SharedMemoryServer | None) -> list[ServerExtension]:
        extensions: list[ServerExtension] = [WeightsGiver(given(weights))]
        if self._lanes is not None and self._tls is None:  # a lane is not encrypted
            extensions.append(LaneServer(self._lanes))
        if symm is not None:
            extensions.append(symm)
        return extensions

    def _shared_memory(self, group: ShardGroup, shard: ExpertShard) -> SharedMemoryServer | None:
        """Steps come whole: not where a layer has no experts here."""
        layers = self._spec.moe_layers
        if not all(group.experts.get(layer) for layer in layers):
            return None
        memory = memory_for(self._settings.fabric_shared, self._device, aside=self._beside)
        if memory is None:
            return None
        return SharedMemoryServer(
            shard.forward,
            memory=memory,
            device=self._device,
            layers=list(layers),
            num_experts=self._spec.num_experts,
            hidden=self._spec.hidden_size,
            dtype=self._dtype,
            wait_s=WAIT_BESIDE_S if self._beside else WAIT_S,
            aside=self._beside,
            limits=Limits(join_rows=JOIN_ROWS if self._settings.joint_steps == "auto" else 0),
        )

    def _given(self, group: ShardGroup, stopped: threading.Event) -> dict[int, ExpertWeights] | None:
        """From another worker, where there is a lane to one: beside TLS there is none."""
        if self._lanes is None or self._tls is not None:
            return None
        timing = ConnectionTiming()
        facts = Facts(
            hello=self._hello(-1),
            secret=self._secret,
            timing=timing,
            max_bytes=MAX_BYTES,
            lanes=self._lanes,
            faults=self.faults,
        )
        digests = partial(read_digests, self._model, self._spec, NAMES[self._dtype])
        with loading_progress(log) as progress:
            weight_sources = WeightSources(self._tables, facts, self._spec, self._dtype, digests)
            return weight_sources.weights(group, stopped.is_set, progress)

    def _read(self, group: ShardGroup, stopped: threading.Event) -> dict[int, ExpertWeights]:
        with loading_progress(log) as progress:
            return load_experts(
                self._model,
                self._spec,
                dtype=self._dtype,
                device=self._device,
                experts=group.experts,
                progress=Stoppable(progress, stopped),
            )

    def _hello(self, seat: int) -> Hello:
        return Hello(
            fingerprint=self._spec.fingerprint,
            worker=self._worker,
            hidden=self._spec.hidden_size,
            dtype=NAMES[self._dtype],
            seat=seat,
            package=self._version,
        )


def _warm(shard: ExpertShard, group: ShardGroup, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels of calls of any size now: an attention worker waits for an answer, not for that."""
    layer, ids = next((layer, ids) for layer, ids in group.experts.items() if ids)
    began = time.perf_counter()
    with torch.inference_mode():
        for rows in (2**power for power in range(MAX_WARM_ROWS.bit_length())):
            ids_T1 = torch.tensor(ids, device=device)[torch.arange(rows, device=device) % len(ids)].unsqueeze(1)
            x_TD = torch.zeros(rows, hidden, dtype=dtype, device=device)
            shard.forward(layer, x_TD, ids_T1, torch.ones(rows, 1, device=device))
    torch.cuda.current_stream(device).synchronize()
    log.info("kernels are ready after %.1f s", time.perf_counter() - began)


def _on(device: torch.device, compute: Compute, *, aside: bool) -> Compute:
    """``compute`` on ``device``, of rows that come from the network; the server brings the answer back.

    ``aside``: not in the order of what others compute on the default stream. The answer is brought back here then.
    """

    def moved(layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return compute(layer, x_TD.to(device), expert_ids_TK.to(device), weights_TK.to(device))

    if not aside:
        return moved
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def moved_aside(layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        with torch.cuda.stream(stream):
            return moved(layer, x_TD, expert_ids_TK, weights_TK).to(x_TD.device)

    return moved_aside
