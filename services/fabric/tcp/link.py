"""ExpertLink over TCP: rows to one replica of each shard group, to another one if that fails.

Made for experts on CPU hosts and for slow networks; between GPUs the rows themselves go by NCCL beside the connection
(:mod:`services.fabric.nccl.lane`), to the seats that can have such a lane.

Legend: T rows, D hidden size, K experts chosen per row.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Hashable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from services.errors import ExpertUnavailable, FingerprintMismatch
from services.fabric.row_counts import ExpertRows
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.connection import SeatLink
from services.fabric.tcp.extension import ClientExtension, Transports
from services.fabric.tcp.frames import DTYPES, MAX_BYTES, Dispatch
from services.fabric.tcp.handshake import Hello, check_facts
from services.fabric.tcp.peer import Timing, deadline_in
from services.fabric.tcp.replicas import Part, Seats
from services.fabric.tcp.split import split, sum_pairs, sum_rows
from services.fabric.tcp.tls import ClientTls
from services.fabric.tcp.versions import SPOKEN, Versions
from services.fabric.wait_times import Stalls
from services.routing import RoutingTable, Seat

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TcpHandle:
    """A dispatch on its way."""

    parts: list[Part]
    x_TD: Tensor
    weights_TK: Tensor
    device: torch.device


class TcpLink:
    """Dispatches to the seats of the newest table given to :meth:`apply`. Thread-safe.

    Args:
        table: the first one.
        hello: what this attention worker is.
        secret: shared by all workers of the cluster.
        reduced: let weights travel and sums return: about K times fewer bytes come back, added in another order.
            Else one unweighted row per pair returns, and the sum equals ``LocalLink``'s to the bit.
        call_s: an answer that takes longer is asked for elsewhere.
        unavailable_s: how long a dispatch waits for a replica where there is none.
        quarantine_s: how long a seat that answered wrongly, or not in time, takes no calls.
        tls: if connections are to be encrypted.
        lanes: offered to seats, unless connections are encrypted: a lane is not.
        extension: what else uses the connections.
        spoken: versions of the protocol.
    """

    def __init__(
        self,
        table: RoutingTable,
        *,
        hello: Hello,
        secret: bytes,
        reduced: bool = False,
        call_s: float = 10.0,
        unavailable_s: float = 10.0,
        quarantine_s: float = 10.0,
        max_bytes: int = MAX_BYTES,
        timing: Timing | None = None,
        tls: ClientTls | None = None,
        lanes: Transports | None = None,
        extension: ClientExtension | None = None,
        spoken: Versions = SPOKEN,
    ) -> None:
        check_facts(hello, secret)
        self._facts = Facts(
            hello=hello,
            secret=secret,
            timing=timing or Timing(),
            max_bytes=max_bytes,
            tls=tls,
            lanes=lanes if tls is None else None,
            spoken=spoken,
        )
        self._extension = extension
        self._reduced = reduced
        self._call_s = call_s
        self._unavailable_s = unavailable_s
        self._changed = threading.Condition()
        self._seats = Seats(call_s=call_s, unavailable_s=unavailable_s, quarantine_s=quarantine_s)
        self._retired: list[tuple[int, SeatLink]] = []
        """Those that the newest table does not list, with the epoch of the last one that did."""
        self._step = 0
        self._micro_batches = itertools.count()
        self._stalls = Stalls()
        self._rows = ExpertRows(table.group_of, table.num_experts)
        self._table = table
        self._adopt(table)

    def apply(self, table: RoutingTable) -> None:
        """Use ``table`` from the next dispatch on, unless a newer one is known. Returns at once.

        New seats are used as soon as they are connected and proven; those that left end their calls and close.

        Raises:
            FingerprintMismatch: the table is of another model; nothing changes.
        """
        with self._changed:
            if table.epoch > self._table.epoch:
                self._adopt(table)
                self._changed.notify_all()

    def oldest_epoch(self) -> int:
        """Of the tables that are needed still: the newest, and those by which a seat that it does not list anymore owes
        an answer. Calls that wait for a replica of another group need no older table: they are sent by the newest."""
        with self._changed:
            return min([self._table.epoch, *(epoch for epoch, link in self._retired if link.busy)])

    def missing(self) -> tuple[int, ...]:
        """Numbers of the groups that have no usable seat."""
        with self._changed:
            return self._missing()

    def usable(self) -> tuple[int, ...]:
        """Numbers of the seats of the table that are connected and proven, and not about to leave."""
        with self._changed:
            return tuple(sorted(link.seat.number for link in self._seats.links.values() if link.usable))

    def ready(self) -> bool:
        return not self.missing()

    def wait_ready(self, seconds: float) -> bool:
        """Whether every group had a usable seat at some moment of that time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._missing(), seconds)

    def begin_step(self, step: int, rows: Sequence[int] = ()) -> None:
        """Calls from now on belong to ``step``; it only names them."""
        del rows
        self._step, self._micro_batches = step, itertools.count()

    def graph_key(self) -> Hashable | None:
        return None

    def capture_context(self, rows: int) -> AbstractContextManager[Hashable | None]:
        del rows
        return nullcontext(None)

    def finish_step(self) -> bool:
        """Always: what failed was sent elsewhere, or :meth:`combine` has raised."""
        return True

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> TcpHandle:
        """As :class:`services.fabric.link.ExpertLink` says. Does not wait for the network.

        Raises:
            ExpertUnavailable: the link is closed.
        """
        hello, device = self._facts.hello, x_TD.device
        assert (x_TD.shape[1], x_TD.dtype) == (hello.hidden, DTYPES[hello.dtype]), "the link is of another model"
        self._rows.count(layer, expert_ids_TK)
        x_TD, weights_TK = x_TD.detach(), weights_TK.detach()
        with self._changed:
            stays = self._seats.lanes()
        if not stays:
            x_TD, weights_TK = x_TD.cpu(), weights_TK.cpu()
        ids_TK, host_weights_TK = expert_ids_TK.cpu(), weights_TK.cpu()
        with self._changed:
            if self._seats.closed:
                raise ExpertUnavailable("The link to the experts is closed.")
            row_bytes = self._row_bytes(ids_TK.shape[1])
            most_rows = max(1, min(self._seats.most_rows(row_bytes), self._facts.max_bytes // row_bytes))
            number, epoch = next(self._micro_batches), self._table.epoch
            parts = []
            for rows in split(x_TD, ids_TK, host_weights_TK, self._table.group_of[layer], most_rows):
                dispatch = Dispatch(
                    call=0,
                    epoch=epoch,
                    step=self._step,
                    layer=layer,
                    micro_batch=number,
                    rows=len(rows.index_R),
                    slots=ids_TK.shape[1],
                    reduced=self._reduced,
                )
                parts.append(Part(rows, dispatch))
                self._seats.settle(parts[-1])
        return TcpHandle(parts, x_TD, weights_TK, device)

    def combine(self, handle: TcpHandle) -> Tensor:
        """As :class:`services.fabric.link.ExpertLink` says.

        Raises:
            ExpertUnavailable: for ``unavailable_s`` no replica of a group could answer, or the link is closed.
        """
        with self._changed:
            try:
                while waiting := [part for part in handle.parts if not self._seats.settle(part)]:
                    until = min(self._seats.wake_at(part) for part in waiting)
                    with self._stalls.waiting([part.rows.group for part in waiting]):
                        self._changed.wait(max(0.0, until - time.monotonic()))
            except BaseException:
                for part in handle.parts:
                    part.abandon()
                raise
        answers = [(part.rows, part.answer) for part in handle.parts if part.answer is not None]
        if self._reduced:
            return sum_rows(answers, handle.x_TD).to(handle.device)
        return sum_pairs(answers, handle.weights_TK, handle.x_TD).to(handle.device)

    def expert_rows(self) -> dict[int, list[int]]:
        """Rows that each expert of each layer has taken since the link was made; resending counts nothing."""
        return self._rows.totals()

    def stalled_s(self) -> dict[int, float]:
        """Seconds that :meth:`combine` has waited, by shard group; where it waited for several, each has its part."""
        return self._stalls.totals()

    def faults(self) -> dict[str, int]:
        """Connections that were refused or ended for what the other side is or sent, by reason."""
        return self._facts.faults.totals()

    def close(self) -> None:
        """End all connections; a combine that waits raises ExpertUnavailable."""
        with self._changed:
            self._seats.closed = True
            links = [*self._seats.links.values(), *(link for _, link in self._retired)]
            for link in links:
                link.shut()
            self._changed.notify_all()
        for link in links:
            link.join(self._facts.timing.handshake_s)
        if self._facts.lanes is not None:
            self._facts.lanes.wait_ended()

    def _adopt(self, table: RoutingTable) -> None:
        if table.fingerprint != self._facts.hello.fingerprint:
            raise FingerprintMismatch(
                f"The routing table is of the model {table.fingerprint!r}, not {self._facts.hello.fingerprint!r}.",
                hint="Start attention and expert workers from the same model folder.",
            )
        assert table.group_of is not None  # raises where the table does not fit together
        known, before, self._table = self._seats.links, self._table.epoch, table
        self._seats.links = {
            _identity(seat): known.pop(_identity(seat))
            if _identity(seat) in known
            else SeatLink(seat, self._facts, self._changed, self._extension)
            for seat in table.seats
        }
        self._seats.groups = {group.number: group for group in table.groups}
        self._retired = [(epoch, link) for epoch, link in self._retired if not link.ended]
        for link in known.values():
            link.retire(deadline_in(self._call_s + self._unavailable_s))
            self._retired.append((before, link))

    def _missing(self) -> tuple[int, ...]:
        usable = {link.seat.group for link in self._seats.links.values() if link.usable}
        return tuple(group.number for group in self._table.groups if group.experts and group.number not in usable)

    def _row_bytes(self, slots: int) -> int:
        """Most bytes that a row takes on its way there or back."""
        width = self._facts.hello.hidden * DTYPES[self._facts.hello.dtype].itemsize
        return max(width + 8 * slots, width if self._reduced else width * slots)


def _identity(seat: Seat) -> tuple[int, str, int, str, int]:
    return seat.number, seat.worker, seat.group, seat.host, seat.port
