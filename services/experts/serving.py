"""Loads the weights of a shard group and serves its experts."""

from __future__ import annotations

import gc
import logging
import threading
import time
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from services.config import Settings
from services.experts.traces import ExpertTraces
from services.experts.weight_sources import Tables, WeightSources, given
from services.fabric.device_counters import side_stream
from services.fabric.faults import Faults
from services.fabric.nccl.lanes import Lanes, LaneServer, lanes_for
from services.fabric.nccl.weights import WeightsGiver
from services.fabric.secret import read_secret
from services.fabric.shared_memory.open_memory import memory_for
from services.fabric.shared_memory.server import WAIT_S, Limits, SharedMemoryServer
from services.fabric.tcp.compute import Compute
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.frames import NAMES
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.server import ExpertServer
from services.fabric.tcp.tls import server_tls
from services.metrics import CHECKPOINT, HOST, PEER, WeightSource
from services.model.device import into_memory
from services.model.digests import read_digests
from services.model.experts import ExpertShard, ExpertWeights
from services.model.load_spec import load_spec
from services.model.products import products_of
from services.model.progress import Stoppable, loading_progress
from services.model.sleep import WeightMemory, check_same, tensors_in
from services.model.spec import ModelSpec
from services.model.weights import load_experts
from services.model.weights_sample import with_weights
from services.routing import ShardGroup
from services.runtime.tracing import Tracer

log = logging.getLogger(__name__)

COLOCATED_WAIT_S = 0.5
"""How long a step waits for rows through shared memory where attention loads kernels on the same GPU: loading waits for
the step, too."""
JOIN_ROWS = 2048
"""Largest number of rows of a call for several attention workers; larger calls gain little."""
INBOX_ROWS = 65_536
"""Number of rows that may wait; then the server stops reading."""
MAX_WARM_ROWS = 4096
"""Largest call to warm up: larger ones take kernels of the same shapes."""


@dataclass(frozen=True, slots=True)
class TcpServing:
    """A group behind an :class:`ExpertServer`: a :class:`services.experts.worker.Serving`.

    Args:
        slots: experts that a row chooses.
    """

    group: ShardGroup
    server: ExpertServer
    shared_memory: SharedMemoryServer | None = None
    slots: int = 1
    lanes: Lanes | None = None
    traces: ExpertTraces | None = None
    loaded: tuple[WeightSource, float] = (CHECKPOINT, 0.0)
    """Where the weights came from, and the seconds that loading them took."""

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
        """Steps through shared memory that ran in a joint step."""
        return self.shared_memory.joined_steps() if self.shared_memory else 0

    @property
    def waited_s(self) -> float:
        return self.server.waited_s + self._shared_s()[1]

    def _shared_s(self) -> tuple[float, float]:
        return self.shared_memory.occupied() if self.shared_memory else (0.0, 0.0)

    @property
    def failure(self) -> BaseException | None:
        return self.server.failure

    def rows(self) -> dict[int, tuple[int, ...]]:
        counted = self.server.counts.expert_rows
        shared = self.shared_memory.rows() if self.shared_memory else {}
        return {
            layer: tuple(
                (counted[layer][expert] if layer in counted else 0) + (shared[layer][expert] if layer in shared else 0)
                for expert in experts
            )
            for layer, experts in self.group.experts.items()
        }

    def layer_rows(self) -> dict[int, int]:
        """Return the rows computed so far, by layer; shared memory counts pairs, of which ``slots`` make a row."""
        rows = dict(self.server.counts.layer_rows)
        for layer, pairs in self.shared_memory.rows().items() if self.shared_memory else ():
            rows[layer] = rows.get(layer, 0) + sum(pairs) // self.slots
        return rows

    def drain(self, seconds: float) -> bool:
        answered = self.server.drain(seconds)
        if self.lanes is not None:
            self.lanes.wait_ended()
        return answered


@dataclass(frozen=True, slots=True)
class _Kept:
    group: ShardGroup
    weights: dict[int, ExpertWeights]
    memory: WeightMemory


class Loader:
    """Loads groups of one checkpoint and serves them; a call blocks while it loads.

    Args:
        colocated: an attention worker of this process computes on the same device.
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
        colocated: bool = False,
        tracer: Tracer | None = None,
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
        self._colocated, self._tracer = colocated, tracer
        self._kept: _Kept | None = None
        self._reads_again = False

    def rest(self, level: int) -> None:
        """Give the memory of the last group back, which nobody computes with any more. At level 1 its weights wait in
        the memory of the host for the next call."""
        if level > 1:
            if self._kept is not None:
                self._kept.memory.free(keep=False)  # also what is pinned of it
            self._kept = None
            self._reads_again = True
        gc.collect()  # what served them must be gone before torch's memory is given back
        if self._kept is not None:
            self._kept.memory.free(keep=True)
        elif self._device.type == "cuda":
            torch.cuda.empty_cache()

    def __call__(self, group: ShardGroup, seat: int, stopped: threading.Event) -> TcpServing:
        """Load ``group`` and serve it in ``seat``.

        Raises:
            LoadStopped: ``stopped`` was set.
            OutOfMemory: the weights do not fit into the device's memory.
            CheckpointError: the weights are damaged or missing.
            PortInUse: another process listens on the port.
        """
        with side_stream(self._device, needed=self._colocated), into_memory(self._device):
            return self._served(group, seat, stopped)

    def _served(self, group: ShardGroup, seat: int, stopped: threading.Event) -> TcpServing:
        began = time.perf_counter()
        source, weights = self._weights(group, stopped)
        loaded = source, time.perf_counter() - began
        products = products_of(batch_invariant=self._settings.batch_invariant)
        spec = self._spec
        shard = ExpertShard(weights, num_experts=spec.num_experts, products=products, activation=spec.expert_activation)
        if self._device.type == "cuda":
            _warm(shard, group, self._spec.hidden_size, self._dtype, self._device)
        memory = self._shared_memory(group, shard)
        extensions: list[ServerExtension] = [WeightsGiver(given(weights))]
        if self._lanes is not None and self._tls is None:  # a lane is not encrypted
            extensions.append(LaneServer(self._lanes))
        if memory is not None:
            extensions.append(memory)
        traces = None if self._tracer is None else ExpertTraces(self._tracer, group, seat)
        server = ExpertServer(
            shard.forward
            if self._device.type == "cpu"
            else _on(self._device, shard.forward, colocated=self._colocated),
            experts=group.experts,
            hello=self._hello(seat),
            secret=self._secret,
            host=self._settings.host,
            port=self._settings.fabric_port,
            inbox_rows=INBOX_ROWS,
            tls=self._tls,
            extensions=extensions,
            faults=self.faults,
            traces=traces,
        )
        server.start()
        return TcpServing(group, server, memory, self._spec.top_k, self._lanes, traces, loaded)

    def _shared_memory(self, group: ShardGroup, shard: ExpertShard) -> SharedMemoryServer | None:
        """Share memory unless a layer has no experts here: steps come with all layers."""
        layers = self._spec.moe_layers
        if not all(group.experts.get(layer) for layer in layers):
            return None
        memory = memory_for(self._settings.fabric_shared, self._device, colocated=self._colocated)
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
            wait_s=COLOCATED_WAIT_S if self._colocated else WAIT_S,
            colocated=self._colocated,
            limits=Limits(join_rows=JOIN_ROWS if self._settings.joint_steps == "auto" else 0),
        )

    def _weights(self, group: ShardGroup, stopped: threading.Event) -> tuple[WeightSource, dict[int, ExpertWeights]]:
        if self._kept is not None and self._kept.group.experts == group.experts:
            self._kept.memory.restore()
            return HOST, self._kept.weights
        self._kept = None  # before the memory of others is taken
        given_by_peer = self._given(group, stopped)
        weights = given_by_peer or self._read(group, stopped)
        if self._settings.enable_sleep_mode:
            self._kept = _Kept(group, weights, WeightMemory(tensors_in(weights)))
        return PEER if given_by_peer else CHECKPOINT, weights

    def _given(self, group: ShardGroup, stopped: threading.Event) -> dict[int, ExpertWeights] | None:
        """Fetch the weights from another worker over a lane, which does not exist with TLS."""
        if self._lanes is None or self._tls is not None:
            return None
        facts = Facts(hello=self._hello(-1), secret=self._secret, lanes=self._lanes, faults=self.faults)
        digests = partial(read_digests, self._model, self._spec, NAMES[self._dtype])
        with loading_progress(log) as progress:
            weight_sources = WeightSources(self._tables, facts, self._spec, self._dtype, digests)
            return weight_sources.weights(group, stopped.is_set, progress)

    def _read(self, group: ShardGroup, stopped: threading.Event) -> dict[int, ExpertWeights]:
        if self._reads_again:  # a sleep lets a long time pass, in which somebody may have put others there
            formats = self._settings.held_experts, self._settings.dense_format
            now = with_weights(load_spec(self._model), self._model, *formats)
            check_same(self._spec, now, self._model)
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
            weights=self._spec.weights,
            worker=self._worker,
            hidden=self._spec.hidden_size,
            dtype=NAMES[self._dtype],
            seat=seat,
            package=self._version,
            batch_invariant=self._settings.batch_invariant,
        )


def _warm(shard: ExpertShard, group: ShardGroup, hidden: int, dtype: torch.dtype, device: torch.device) -> None:
    """Compile and load the kernels of calls of any size, so that no attention worker waits for that."""
    layer, ids = next((layer, ids) for layer, ids in group.experts.items() if ids)
    began = time.perf_counter()
    with torch.inference_mode():
        for rows in (2**power for power in range(MAX_WARM_ROWS.bit_length())):
            ids_T1 = torch.tensor(ids, device=device)[torch.arange(rows, device=device) % len(ids)].unsqueeze(1)
            x_TD = torch.zeros(rows, hidden, dtype=dtype, device=device)
            shard.forward(layer, x_TD, ids_T1, torch.ones(rows, 1, device=device))
    torch.cuda.current_stream(device).synchronize()
    log.info("warmed up the kernels in %.1f s", time.perf_counter() - began)


def _on(device: torch.device, compute: Compute, *, colocated: bool) -> Compute:
    """Return ``compute`` for rows that come from the network: they are moved to ``device``.

    A ``colocated`` seat computes on a side stream, and moves the answer back; otherwise the server moves it.
    """

    def moved(layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        return compute(layer, x_TD.to(device), expert_ids_TK.to(device), weights_TK.to(device))

    if not colocated:
        return moved
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def moved_on_side_stream(layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        with torch.cuda.stream(stream):
            return moved(layer, x_TD, expert_ids_TK, weights_TK).to(x_TD.device)

    return moved_on_side_stream
