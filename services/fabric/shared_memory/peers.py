"""The attention worker's end of shared memory: which seats of this node share memory with it, and at which addresses.

The threads of the seats' connections write here; the engine's thread reads between steps. The loss of a seat ends the
step that uses it at once instead of at the step's deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass

from moe_kernels.exchange.layout import Layout
from services.errors import ExpertMeshError, FabricError
from services.fabric.shared_memory.memory import PeerMapping, PeerMemory, Region
from services.fabric.shared_memory.messages import ShareReply, ShareRequest, Step, Stop
from services.fabric.tcp.extension import ConnectedSeat
from services.fabric.tcp.frames import Frame, Kind, message_of
from services.fabric.tcp.peer import Peer

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SharedSeat:
    """A seat that shares memory with this worker, or is asked to: then it has given no ``inbox`` for rows yet.

    The seat writes into ``answers``. ``place`` is this worker's number among the seat's clients; a ``colocated`` seat
    shares its GPU with an attention worker.
    """

    link: ConnectedSeat
    peer: Peer
    answers: Region
    inbox: PeerMapping | None = None
    place: int = -1
    colocated: bool = False
    lost: bool = False

    @property
    def usable(self) -> bool:
        """Whether steps may be sent there; the seat may be lost at any time."""
        return self.inbox is not None and not self.lost

    @property
    def device(self) -> str:
        """UUID of the GPU that has the inbox; "" for memory of the host, or where there is none."""
        return self.inbox.device if self.inbox else ""

    def start(self, step: Step) -> None:
        """Begin ``step`` at the seat."""
        self.peer.send(Kind.SHARED_STEP, step)

    def stop(self) -> None:
        """Let the seat wait no longer for rows of the step that was started last."""
        self.peer.send(Kind.SHARED_STOP, Stop())


class SharedPeers:
    """A :class:`services.fabric.tcp.extension.ClientExtension`.

    Args:
        layout: where rows and answers lie, at every seat.
        node: name of this machine, as seats give theirs; only seats of this machine are asked to share memory.
        on_lost: called with a lost seat that the running step uses, in the thread of the seat's connection.
    """

    def __init__(self, memory: PeerMemory, layout: Layout, *, node: str, on_lost: Callable[[SharedSeat], None]) -> None:
        self._memory, self._layout, self._node, self._on_lost = memory, layout, node, on_lost
        self._changed = threading.Condition()
        self._seats: dict[ConnectedSeat, SharedSeat] = {}
        self._left: list[SharedSeat] = []
        self._on_tcp: frozenset[ConnectedSeat] = frozenset()
        """Seats of this node that cannot share memory."""
        self._in_step: frozenset[SharedSeat] = frozenset()

    def usable(self) -> list[SharedSeat]:
        """Return the seats that steps may be sent to."""
        with self._changed:
            return [shared for shared in self._seats.values() if shared.usable]

    def wait_for(self, condition: Callable[[list[SharedSeat]], bool], seconds: float) -> bool:
        """Return whether ``condition`` was true of the usable seats at some moment within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: condition(self.usable()), seconds)

    def use(self, seats: frozenset[SharedSeat]) -> None:
        """Note which seats' memory kernels use from now on: those of the step that begins, none once it has ended."""
        with self._changed:
            self._in_step = seats

    def carries(self, seat: ConnectedSeat, rows: int) -> bool:
        return seat.seat.node == self._node and rows <= self._layout.rows and seat not in self._on_tcp

    def opened(self, seat: ConnectedSeat, peer: Peer) -> None:
        if seat.seat.node != self._node:
            return
        self._close_lost()
        try:
            shared = SharedSeat(seat, peer, self._memory.share(self._layout.answers_bytes))
        except (ExpertMeshError, RuntimeError) as error:
            self._stay_on_tcp(seat, error)
            return
        with self._changed:
            self._seats[seat] = shared
        layout = self._layout
        request = ShareRequest(
            handle=shared.answers.handle,
            rows=layout.rows,
            slots=layout.slots,
            micro_batches=layout.micro_batches,
            unsummed=layout.unsummed,
        )
        peer.send(Kind.SHARE_REQUEST, request)

    def take(self, seat: ConnectedSeat, frame: Frame) -> bool:
        if frame.kind != Kind.SHARE_REPLY:
            return False
        reply, shared = message_of(frame, ShareReply), self._seats.get(seat)
        if reply.problem:
            self._stay_on_tcp(seat, reply.problem)
        elif shared is not None and shared.inbox is None:
            self._map(shared, reply)
        return True

    def lost(self, seat: ConnectedSeat) -> None:
        with self._changed:
            self._on_tcp -= {seat}
            shared = self._seats.pop(seat, None)
            if shared is None:
                return
            shared.lost = True
            self._left.append(shared)
            in_step = shared in self._in_step
        if in_step:
            self._on_lost(shared)

    def busy(self, seat: ConnectedSeat) -> bool:
        return any(shared.link is seat for shared in self._in_step)

    def close(self) -> None:
        """Close all memory except that of seats in a step. All connections have ended before."""
        with self._changed:
            self._left += self._seats.values()
            self._seats.clear()
        self._close_lost()

    def _map(self, shared: SharedSeat, reply: ShareReply) -> None:
        try:
            inbox = self._memory.open(reply.handle)
        except FabricError as error:
            self._stay_on_tcp(shared.link, error)
            return
        with self._changed:
            shared.inbox, shared.place, shared.colocated = inbox, reply.place, reply.colocated
            self._changed.notify_all()
        log.info("sharing memory with %s", shared.link.name)

    def _stay_on_tcp(self, seat: ConnectedSeat, problem: object) -> None:
        log.warning("using TCP instead of shared memory with %s: %s", seat.name, problem)
        with self._changed:
            self._on_tcp |= {seat}

    def _close_lost(self) -> None:
        """Close the memory of lost seats that no step uses: when the next seat comes, not while a step runs again."""
        with self._changed:
            left = [shared for shared in self._left if shared not in self._in_step]
            self._left = [shared for shared in self._left if shared in self._in_step]
        for shared in left:
            shared.answers.close()
            if shared.inbox is not None:
                shared.inbox.close()
