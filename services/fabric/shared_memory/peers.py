"""The attention worker's end of shared memory: which seats of this node it is shared with, and their addresses.

Filled by the threads of the seats' connections, read by the engine's thread between steps. A seat that is lost ends the
step that counts on it at once instead of at the step's deadline.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Set
from dataclasses import dataclass

from moe_kernels.exchange.layout import Layout
from services.errors import ExpertMeshError, FabricError
from services.fabric.shared_memory.memory import Mapping, PeerMemory, Region
from services.fabric.shared_memory.messages import ShareReply, ShareRequest, Step, Stop
from services.fabric.tcp.extension import ConnectedSeat
from services.fabric.tcp.frames import Frame, Kind, message_of
from services.fabric.tcp.peer import Peer

log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class SharedSeat:
    """A seat that has rows and answers in shared memory. ``place``: this worker's number among the seat's clients;
    ``beside``: it shares its device with an attention worker."""

    link: ConnectedSeat
    peer: Peer
    answers: Region
    inbox: Mapping | None = None
    place: int = -1
    beside: bool = False
    lost: bool = False

    @property
    def usable(self) -> bool:
        """Steps may be sent there. Like its connection it may be lost at any time."""
        return self.inbox is not None and not self.lost

    @property
    def device(self) -> str:
        """Whose memory its inbox is."""
        return self.inbox.device if self.inbox else ""

    def start(self, step: Step) -> None:
        self.peer.send(Kind.SHARED_STEP, step)

    def stop(self) -> None:
        """Let it wait no longer for rows of the step that was started last."""
        self.peer.send(Kind.SHARED_STOP, Stop())


class SharedPeers:
    """A :class:`services.fabric.tcp.extension.ClientExtension`.

    Args:
        layout: of rows and answers, the same for all seats.
        node: this machine, as seats name theirs; only its seats get offers.
        on_lost: called with a seat that was shared and is no more, in its connection's thread.
    """

    def __init__(self, memory: PeerMemory, layout: Layout, *, node: str, on_lost: Callable[[SharedSeat], None]) -> None:
        self._memory, self._layout, self._node, self._on_lost = memory, layout, node, on_lost
        self._changed = threading.Condition()
        self._seats: dict[ConnectedSeat, SharedSeat] = {}
        self._left: list[SharedSeat] = []
        self._on_tcp: frozenset[ConnectedSeat] = frozenset()
        """Seats of this node with which no memory can be shared."""
        self._in_step: frozenset[SharedSeat] = frozenset()

    def usable(self) -> list[SharedSeat]:
        with self._changed:
            return [shared for shared in self._seats.values() if shared.usable]

    def wait_for(self, seats: int, seconds: float) -> bool:
        """Whether so many seats were shared at some moment of that time."""
        with self._changed:
            return self._changed.wait_for(lambda: sum(seat.usable for seat in self._seats.values()) >= seats, seconds)

    def wait_for_groups(self, groups: Set[int], seconds: float) -> bool:
        """Whether each of ``groups`` had a shared seat at some moment of that time."""
        with self._changed:
            return self._changed.wait_for(
                lambda: groups <= {seat.link.seat.group for seat in self._seats.values() if seat.usable}, seconds
            )

    def begin(self, seats: frozenset[SharedSeat]) -> None:
        """A step counts on ``seats``; none is under way."""
        with self._changed:
            self._in_step = seats

    def end(self) -> None:
        """No kernel uses any seat's memory any more."""
        with self._changed:
            self._in_step = frozenset()

    def carries(self, seat: ConnectedSeat, rows: int) -> bool:
        return seat.seat.node == self._node and rows <= self._layout.rows and seat not in self._on_tcp

    def opened(self, seat: ConnectedSeat, peer: Peer) -> None:
        if seat.seat.node != self._node:
            return
        self._tidy()
        try:
            shared = SharedSeat(seat, peer, self._memory.share(self._layout.answers_bytes))
        except (ExpertMeshError, RuntimeError) as error:
            self._stay_on_tcp(seat, error)
            return
        with self._changed:
            self._seats[seat] = shared
        layout = self._layout
        offer = ShareRequest(
            ticket=shared.answers.ticket,
            rows=layout.rows,
            slots=layout.slots,
            micro_batches=layout.micro_batches,
            unsummed=layout.unsummed,
        )
        peer.send(Kind.SHARE_REQUEST, offer)

    def take(self, seat: ConnectedSeat, frame: Frame) -> bool:
        if frame.kind != Kind.SHARE_REPLY:
            return False
        taken, shared = message_of(frame, ShareReply), self._seats.get(seat)
        if taken.problem:
            self._stay_on_tcp(seat, taken.problem)
        elif shared is not None and shared.inbox is None:
            self._map(shared, taken)
        return True

    def lost(self, seat: ConnectedSeat) -> None:
        with self._changed:
            self._on_tcp -= {seat}
            shared = self._seats.pop(seat, None)
            if shared is None:
                return
            shared.lost = True
            self._left.append(shared)
            counted_on = shared in self._in_step
        if counted_on:
            self._on_lost(shared)

    def busy(self, seat: ConnectedSeat) -> bool:
        return any(shared.link is seat for shared in self._in_step)

    def close(self) -> None:
        """Let go of all memory but that of seats in a step. Nothing may come in any more."""
        with self._changed:
            self._left += self._seats.values()
            self._seats.clear()
        self._tidy()

    def _map(self, shared: SharedSeat, taken: ShareReply) -> None:
        try:
            inbox = self._memory.open(taken.ticket)
        except FabricError as error:
            self._stay_on_tcp(shared.link, error)
            return
        with self._changed:
            shared.inbox, shared.place, shared.beside = inbox, taken.place, taken.beside
            self._changed.notify_all()
        log.info("%s shares memory", shared.link.name)

    def _stay_on_tcp(self, seat: ConnectedSeat, problem: object) -> None:
        log.warning("Rows of %s stay on tcp: %s", seat.name, problem)
        with self._changed:
            self._on_tcp |= {seat}

    def _tidy(self) -> None:
        """Let go of the memory of lost seats that no step uses: when another one comes, not while steps run again."""
        with self._changed:
            left = [shared for shared in self._left if shared not in self._in_step]
            self._left = [shared for shared in self._left if shared in self._in_step]
        for shared in left:
            shared.answers.close()
            if shared.inbox is not None:
                shared.inbox.close()
