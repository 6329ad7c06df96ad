"""The expert worker's end of shared memory: takes offers of attention workers of the node, starts their steps.

Every client has an inbox, answers to write to and prepared steps of its own, so none waits for another: but where it is
measured to be faster, steps that begin at about the same time run as one.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import torch

from moe_kernels.exchange.layout import Layout
from services.errors import ExpertMeshError, FabricError, WireError
from services.fabric.device_counters import Counters, beside
from services.fabric.shared_memory.busy_time import Occupied
from services.fabric.shared_memory.joint.queue import JoinQueue
from services.fabric.shared_memory.joint.steps import JointStep, JointStepBody
from services.fabric.shared_memory.memory import Mapping as PeerMapping
from services.fabric.shared_memory.memory import PeerMemory, Region
from services.fabric.shared_memory.messages import ShareReply, ShareRequest, Step, Stop, buckets
from services.fabric.shared_memory.steps import Shape, StepBody, Steps, prepared
from services.fabric.tcp.compute import Compute
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.frames import Frame, Kind, message_of
from services.fabric.tcp.peer import Peer

log = logging.getLogger(__name__)

MAX_CLIENTS = 16
WAIT_S = 2.0
"""How long a started step waits for rows: an attention worker that pauses, not one that died, which is told apart by
its connection."""
_RECHECK_S = 0.002


@dataclass(frozen=True, kw_only=True, slots=True)
class Limits:
    """What offers are held against. ``bytes``: of memory for one client's rows; ``join_rows``: most rows of a call for
    several clients, with 0 there is none."""

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
        """Alone."""
        assert self.body is not None
        assert self.steps is not None
        self.steps.start(Shape(step.bucket, step.micro_batches), self.body.words_of(step, self.answers_at, wait_s))

    def idle(self) -> bool:
        return self.steps is None or self.steps.idle()


class SharedMemoryServer(ServerExtension):
    """Extends the connections of an :class:`services.fabric.tcp.server.ExpertServer` by steps through shared memory.

    Args:
        compute: takes tensors of ``device``; called from threads and captured in graphs.
        layers: those with experts here, in the order of the model: all layers with experts.
        num_experts: per layer, in the whole model.
        wait_s: how long a started step waits for rows.
        aside: others compute on the device's default stream, in this process: clients are prepared beside it.
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
        aside: bool = False,
    ) -> None:
        self._compute, self._memory, self._device = compute, memory, device
        self._layers, self._hidden, self._dtype = list(layers), hidden, dtype
        self._limits, self._wait_s = limits or Limits(), wait_s
        self._counts_LE = torch.zeros(len(layers), num_experts, dtype=torch.int64, device=device)
        self._beside, self._aside = aside, aside and device.type == "cuda"
        self._counters = Counters()
        self._counters.read(self._counts_LE)  # makes what it needs before anything waits on this GPU
        if device.type == "cuda":
            torch.cuda.current_stream(device).synchronize()  # clients' streams do not wait for this one
        self._lock = threading.Lock()
        self._clients: dict[Peer, _Client] = {}
        self._in_use: list[object] = []
        """What is never let go of: it might be written to."""
        self._join_queue = JoinQueue(self._joint_step if self._limits.join_rows else None, wait_s)
        self._occupied, self._of_the_gone_s = Occupied(), 0.0

    def take(self, peer: Peer, frame: Frame) -> bool:
        """Whether ``frame`` was about shared memory.

        Raises:
            WireError: it was, but does not fit what went before.
        """
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
        """The connection ended: what runs for it is given up, what it has is let go of."""
        with self._lock:
            client = self._clients.get(peer)
            if client is None:
                return
            client.gone = True
            prepared = client.steps is not None
        if prepared:
            self._dismiss(peer, client)

    def rows(self) -> Mapping[int, Sequence[int]]:
        """Layer -> pairs by expert since the start; steps that are run again count again."""
        return dict(zip(self._layers, self._counters.read(self._counts_LE), strict=True))

    def occupied(self) -> tuple[float, float]:
        """Seconds since the start in which rows of steps were computed, and which they took longer for one another."""
        with self._lock:
            here_s = sum(client.steps.seconds for client in self._clients.values() if client.steps is not None)
            self._occupied.add(self._of_the_gone_s + here_s + self._join_queue.seconds)
            return self._occupied.busy_s, self._occupied.waited_s

    def idle(self) -> bool:
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
        """Steps of clients that began together with another one's, since the start."""
        return self._join_queue.joined_steps

    def close(self) -> None:
        self._join_queue.close()
        self._memory.close()

    def _start(self, peer: Peer, step: Step) -> None:
        client, _ = self._prepared_steps(peer, "starts")
        assert client.body is not None
        if Shape(step.bucket, step.micro_batches) not in set(client.body.shapes):
            raise WireError(f"{peer.name} starts a step of {step.micro_batches} x {step.bucket} rows.")
        self._join_queue.begin(client, step)

    def _prepared_steps(self, peer: Peer, does: str) -> tuple[_Client, Steps]:
        client = self._clients.get(peer)
        if client is None or client.steps is None:
            raise WireError(f"{peer.name} {does} a step before its offer was taken.")
        return client, client.steps

    def _admit(self, peer: Peer, offer: ShareRequest) -> None:
        with self._lock:
            if peer in self._clients:
                raise WireError(f"{peer.name} offers memory twice.")
            taken = {client.place for client in self._clients.values()}
            client = _Client(min(set(range(len(taken) + 1)) - taken), self._layout(offer))
            self._clients[peer] = client
        # Mapping memory and capturing graphs take a while; calls over the same connection go on.
        threading.Thread(
            target=self._prepare, args=(peer, client, offer), name="shared memory client", daemon=True
        ).start()

    def _prepare(self, peer: Peer, client: _Client, offer: ShareRequest) -> None:
        began = time.perf_counter()
        try:
            with beside(self._device) if self._aside else nullcontext():
                answer = self._prepared(client, offer.ticket)
        except Exception as error:  # the thread's boundary: its rows go as without shared memory
            known = isinstance(error, ExpertMeshError | RuntimeError)
            log.warning("Rows of %s stay on tcp: %s", peer.name, error, exc_info=None if known else error)
            answer = ShareReply(problem=str(error)[:1000])
        with self._lock:
            gone = client.gone
        if gone:
            self._dismiss(peer, client)
            return
        log.info("prepared for %s in %.2f s", peer.name, time.perf_counter() - began)
        peer.send(Kind.SHARE_REPLY, answer)

    def _layout(self, offer: ShareRequest) -> Layout:
        return Layout(
            rows=offer.rows,
            hidden=self._hidden,
            slots=offer.slots,
            dtype=self._dtype,
            micro_batches=offer.micro_batches,
            unsummed=offer.unsummed,
        )

    def _prepared(self, client: _Client, ticket: bytes) -> ShareReply:
        layout = client.layout
        if client.place >= self._limits.clients or layout.inbox_bytes > self._limits.bytes:
            return ShareReply(
                problem=f"{layout.inbox_bytes} bytes for client {client.place} are more than is allowed here."
            )
        client.answers = self._memory.open(ticket)
        client.region = self._memory.share(layout.inbox_bytes)
        client.body = StepBody(self._compute, self._layers, client.region.bytes, self._counts_LE, layout)
        client.steps = prepared(client.body)
        self._join_queue.enter(client)
        return ShareReply(ticket=client.region.ticket, place=client.place, beside=self._beside)

    def _joint_step(self, layout: Layout, members: int) -> JointStep:
        """
        Raises:
            FabricError: calls of so many have too many rows.
        """
        rows = self._limits.join_rows
        if members * buckets(layout.rows)[0] > rows:
            raise FabricError(f"{members} of them have more than {rows} rows.")
        with beside(self._device) if self._aside else nullcontext():
            body = JointStepBody(self._compute, self._layers, self._counts_LE, layout, members=members, rows=rows)
            return JointStep(body, wait_s=self._wait_s)

    def _dismiss(self, peer: Peer, client: _Client) -> None:
        if not self._join_queue.leave(client):
            log.error("A call with rows of %s did not end; its memory stays.", peer.name)
            self._in_use.append((client.answers, client.region))
            client.answers = client.region = None
        if client.steps is not None:
            client.steps.close()
        with self._lock:
            self._of_the_gone_s += client.steps.seconds if client.steps is not None else 0.0
            client.steps = client.body = None
        for memory in (client.answers, client.region):
            if memory is not None:
                memory.close()
        with self._lock:
            self._clients.pop(peer, None)
