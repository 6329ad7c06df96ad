"""The expert worker's end of shared memory: shares memory with attention workers of the node and starts their steps.

Every client has an inbox, a mapping of its answers and prepared steps of its own, so that no client waits for another.
Steps that begin at about the same time may run as one joint step, where that is measured to be faster.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from moe_kernels.exchange.layout import Layout
from services.errors import ExpertMeshError, FabricError, WireError
from services.fabric.device_counters import Counters, side_stream
from services.fabric.shared_memory.busy_time import Occupied
from services.fabric.shared_memory.joint.queue import JoinQueue
from services.fabric.shared_memory.joint.steps import JointStep, JointStepBody
from services.fabric.shared_memory.memory import PeerMapping, PeerMemory, Region
from services.fabric.shared_memory.messages import ShareReply, ShareRequest, Step, Stop, buckets
from services.fabric.shared_memory.steps import Shape, StepBody, Steps, prepared
from services.fabric.tcp.compute import Compute
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.frames import Frame, Kind, message_of
from services.fabric.tcp.peer import Peer

log = logging.getLogger(__name__)

MAX_CLIENTS = 16
WAIT_S = 2.0
"""How long a started step waits for rows of an attention worker that pauses; the end of its connection shows that one
has died."""
_RECHECK_S = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """Largest number of clients, of bytes for the rows of one client, and of rows in a call for several clients.

    With 0 ``join_rows`` no steps are joined.
    """

    clients: int = MAX_CLIENTS
    bytes: int = 1 << 30
    join_rows: int = 0


@dataclass(slots=True, eq=False)
class _Client:
    place: int
    layout: Layout
    body: StepBody | None = None
    steps: Steps | None = None
    region: Region | None = None
    answers: PeerMapping | None = None
    gone: bool = False

    @property
    def inbox(self) -> int:
        assert self.region is not None
        return self.region.bytes.data_ptr()

    @property
    def answers_at(self) -> int:
        assert self.answers is not None
        return self.answers.address

    def begin(self, step: Step, wait_s: float) -> None:
        assert self.body is not None
        assert self.steps is not None
        self.steps.start(Shape(step.bucket, step.micro_batches), self.body.words_of(step, self.answers_at, wait_s))

    def idle(self) -> bool:
        return self.steps is None or self.steps.idle()


class SharedMemoryServer(ServerExtension):
    """Extends the connections of an :class:`services.fabric.tcp.server.ExpertServer` by steps through shared memory.

    Args:
        compute: takes tensors of ``device``; called from several threads and captured in graphs.
        layers: all layers of the model with experts, in order; each has experts here.
        num_experts: experts per layer, in the whole model.
        wait_s: how long a started step waits for rows.
        colocated: an attention worker of this process computes on ``device``'s default stream, so that clients are
            prepared on other streams.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        memory: PeerMemory,
        device: torch.device,
        layers: Sequence[int],
        num_experts: int,
        hidden: int,
        dtype: torch.dtype,
        limits: Limits | None = None,
        wait_s: float = WAIT_S,
        colocated: bool = False,
    ) -> None:
        self._compute, self._memory, self._device = compute, memory, device
        self._layers, self._hidden, self._dtype = list(layers), hidden, dtype
        self._limits, self._wait_s = limits or Limits(), wait_s
        self._counts_LE = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        self._colocated = colocated
        self._counters = Counters()
        self._counters.read(self._counts_LE)  # allocates before any kernel waits on this GPU
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # clients' streams do not wait for this stream
        self._lock = threading.Lock()
        self._clients: dict[Peer, _Client] = {}
        self._never_closed: list[object] = []
        """Memory of clients whose last step did not end: kernels might still write to it."""
        self._join_queue = JoinQueue(self._joint_step if self._limits.join_rows else None, wait_s)
        self._occupied, self._left_s = Occupied(), 0.0

    def take(self, peer: Peer, frame: Frame) -> bool:
        if frame.kind == Kind.SHARED_STEP:
            self._start(peer, message_of(frame, Step))
        elif frame.kind == Kind.SHARED_STOP:
            message_of(frame, Stop)
            client, steps = self._prepared_steps(peer, "stops")
            self._join_queue.stop(client, steps.give_up)
        elif frame.kind == Kind.SHARE_REQUEST:
            self._admit(peer, message_of(frame, ShareRequest))
        else:
            return False
        return True

    def lost(self, peer: Peer) -> None:
        """Give up the client's step and close its memory."""
        with self._lock:
            client = self._clients.get(peer)
            if client is None:
                return
            client.gone = True
            is_prepared = client.steps is not None
        if is_prepared:
            self._remove(peer, client)

    def rows(self) -> Mapping[int, Sequence[int]]:
        """Return layer -> pairs by expert since the start; a step that is run again counts again."""
        return dict(zip(self._layers, self._counters.read(self._counts_LE), strict=True))

    def occupied(self) -> tuple[float, float]:
        """Return ``busy_s`` and ``waited_s`` of all steps since the start, as :class:`Occupied` divides their time."""
        with self._lock:
            here_s = sum(client.steps.seconds for client in self._clients.values() if client.steps is not None)
            self._occupied.add(self._left_s + here_s + self._join_queue.seconds)
            return self._occupied.busy_s, self._occupied.waited_s

    def idle(self) -> bool:
        """Return whether no step runs or is held."""
        with self._lock:
            alone = all(client.steps is None or client.steps.idle() for client in self._clients.values())
            return alone and self._join_queue.idle()

    def wait_idle(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while not self.idle():
            if time.monotonic() > until:
                return False
            time.sleep(_RECHECK_S)
        return True

    def joined_steps(self) -> int:
        """Return how many steps of clients have run in joint steps since the start."""
        return self._join_queue.joined_steps

    def close(self) -> None:
        self._join_queue.close()
        self._memory.close()

    def _start(self, peer: Peer, step: Step) -> None:
        client, _ = self._prepared_steps(peer, "starts")
        assert client.body is not None
        if Shape(step.bucket, step.micro_batches) not in set(client.body.shapes):
            raise WireError(
                f"{peer.name} started a step of {step.micro_batches} x {step.bucket} rows, which was not prepared."
            )
        self._join_queue.begin(client, step)

    def _prepared_steps(self, peer: Peer, does: str) -> tuple[_Client, Steps]:
        client = self._clients.get(peer)
        if client is None or client.steps is None:
            raise WireError(f"{peer.name} {does} a step before memory was shared.")
        return client, client.steps

    def _admit(self, peer: Peer, request: ShareRequest) -> None:
        layout = Layout(
            rows=request.rows,
            hidden=self._hidden,
            slots=request.slots,
            dtype=self._dtype,
            micro_batches=request.micro_batches,
            unsummed=request.unsummed,
        )
        with self._lock:
            if peer in self._clients:
                raise WireError(f"{peer.name} asked for memory twice.")
            taken = {client.place for client in self._clients.values()}
            client = _Client(min(set(range(len(taken) + 1)) - taken), layout)
            self._clients[peer] = client
        # Mapping memory and capturing graphs take a while; calls over the same connection go on.
        threading.Thread(
            target=self._prepare, args=(peer, client, request.handle), name="shared memory client", daemon=True
        ).start()

    def _prepare(self, peer: Peer, client: _Client, handle: bytes) -> None:
        began = time.perf_counter()
        try:
            with side_stream(self._device, needed=self._colocated):
                reply = self._prepared(client, handle)
        except Exception as error:  # the thread's boundary: its rows go as without shared memory
            known = isinstance(error, ExpertMeshError | RuntimeError)
            log.warning(
                "using TCP instead of shared memory with %s: %s", peer.name, error, exc_info=None if known else error
            )
            reply = ShareReply(problem=str(error)[:1000])
        with self._lock:
            gone = client.gone
        if gone:
            self._remove(peer, client)
            return
        log.info("prepared shared memory for %s in %.2f s", peer.name, time.perf_counter() - began)
        peer.send(Kind.SHARE_REPLY, reply)

    def _prepared(self, client: _Client, handle: bytes) -> ShareReply:
        layout = client.layout
        if client.place >= self._limits.clients or layout.inbox_bytes > self._limits.bytes:
            return ShareReply(
                problem=f"Client {client.place} needs {layout.inbox_bytes} bytes, more than is allowed here."
            )
        client.answers = self._memory.open(handle)
        client.region = self._memory.share(layout.inbox_bytes)
        client.body = StepBody(self._compute, self._layers, client.region.bytes, self._counts_LE, layout)
        client.steps = prepared(client.body)
        self._join_queue.enter(client)
        return ShareReply(handle=client.region.handle, place=client.place, colocated=self._colocated)

    def _joint_step(self, layout: Layout, members: int) -> JointStep:
        """Raise FabricError where calls for so many members have too many rows."""
        rows = self._limits.join_rows
        if members * buckets(layout.rows)[0] > rows:
            raise FabricError(f"Calls for {members} workers would have more than {rows} rows.")
        with side_stream(self._device, needed=self._colocated):
            body = JointStepBody(self._compute, self._layers, self._counts_LE, layout, members=members, rows=rows)
            return JointStep(body, wait_s=self._wait_s)

    def _remove(self, peer: Peer, client: _Client) -> None:
        if not self._join_queue.leave(client):
            log.error("a call with rows of %s did not end; its memory stays allocated", peer.name)
            self._never_closed.append((client.answers, client.region))
            client.answers = client.region = None
        if client.steps is not None:
            client.steps.close()
        with self._lock:
            self._left_s += client.steps.seconds if client.steps is not None else 0.0
            client.steps = client.body = None
        for memory in (client.answers, client.region):
            if memory is not None:
                memory.close()
        with self._lock:
            self._clients.pop(peer, None)
