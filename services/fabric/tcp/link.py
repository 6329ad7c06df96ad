"""ExpertLink over TCP: rows go to one replica of each shard group, and to another replica if the first fails.

Rows go in frames to experts on CPU hosts and over slow networks. Between GPUs they go by NCCL next to the connection
(:mod:`services.fabric.nccl.lane`), to seats that have such a lane.

Legend: T rows, D hidden size, K experts chosen per row.
"""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from services.errors import ExpertUnavailable, FingerprintMismatch
from services.fabric.row_counts import CountedLink, ExpertRows
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.connection import SeatLink
from services.fabric.tcp.extension import ClientExtension
from services.fabric.tcp.frames import DTYPES, Dispatch, TracedDispatch
from services.fabric.tcp.handshake import check_facts
from services.fabric.tcp.peer import deadline_in
from services.fabric.tcp.replicas import Part, Seats
from services.fabric.tcp.split import split, sum_pairs, sum_rows
from services.fabric.wait_times import Stalls
from services.routing import RoutingTable, Seat

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TcpHandle:
    """A dispatch in flight."""

    parts: list[Part]
    x_TD: Tensor
    weights_TK: Tensor
    device: torch.device


class TcpLink(CountedLink):
    """Dispatches to the seats of the newest table given to :meth:`apply`. Thread-safe.

    Args:
        table: the first routing table.
        facts: how to connect to seats. With TLS no lane is offered: a lane is not encrypted.
        reduced: send weights and receive sums: about K times fewer bytes come back, summed in another order. Otherwise
            one unweighted row per pair comes back, and the sum equals that of ``LocalLink`` to the bit.
        call_s: timeout of a call, after which another replica gets its rows.
        unavailable_s: how long a dispatch waits for a replica where there is none.
        quarantine_s: how long a seat that answered wrongly, or not in time, takes no calls.
        extension: what else uses the connections.

    Raises:
        ConfigError: the facts cannot be used.
        FingerprintMismatch: the table is of another model.
    """

    def __init__(
        self,
        table: RoutingTable,
        facts: Facts,
        *,
        reduced: bool = False,
        call_s: float = 10.0,
        unavailable_s: float = 10.0,
        quarantine_s: float = 10.0,
        extension: ClientExtension | None = None,
    ) -> None:
        check_facts(facts.hello, facts.secret)
        super().__init__(ExpertRows(table.group_of, table.num_experts))
        self._facts = facts if facts.tls is None else replace(facts, lanes=None)
        self._extension = extension
        self._reduced = reduced
        self._call_s = call_s
        self._unavailable_s = unavailable_s
        self._changed = threading.Condition()
        self._seats = Seats(call_s=call_s, unavailable_s=unavailable_s, quarantine_s=quarantine_s)
        self._retired: list[tuple[int, SeatLink]] = []
        """Seats that the newest table does not list, each with the epoch of the last table that did."""
        self._step, self._by_lane = 0, False
        self._micro_batches = itertools.count()
        self._stalls = Stalls()
        self._trace = b""
        self._table = table
        self._adopt(table)

    def apply(self, table: RoutingTable) -> None:
        """Use ``table`` from the next dispatch on, unless a newer table is known. Return at once.

        New seats are used as soon as they are connected and proven; seats that left finish their calls and close.

        Raises:
            FingerprintMismatch: the table is of another model; nothing changes.
        """
        with self._changed:
            if table.epoch > self._table.epoch:
                self._adopt(table)
                self._changed.notify_all()

    def oldest_epoch(self) -> int:
        """Return the epoch of the oldest table in use: the newest table, or one whose retired seats owe an answer.

        Calls that wait for a replica need no older table: the newest one will say where they go.
        """
        with self._changed:
            return min([self._table.epoch, *(epoch for epoch, link in self._retired if link.busy)])

    def missing(self) -> tuple[int, ...]:
        """Return the numbers of the groups that have no usable seat."""
        with self._changed:
            usable = {link.seat.group for link in self._seats.links.values() if link.usable}
            return tuple(group.number for group in self._table.groups if group.experts and group.number not in usable)

    def usable(self) -> tuple[int, ...]:
        """Return the numbers of the table's seats that are connected and proven, and not about to leave."""
        with self._changed:
            return tuple(sorted(link.seat.number for link in self._seats.links.values() if link.usable))

    def wait_ready(self, seconds: float) -> bool:
        """Return whether every group had a usable seat at some moment within ``seconds``."""
        with self._changed:
            return self._changed.wait_for(lambda: not self.missing(), seconds)

    def begin_step(self, step: int, rows: Sequence[int] = ()) -> None:
        """Name the calls that follow by ``step``."""
        del rows
        self._step, self._micro_batches = step, itertools.count()

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> TcpHandle:
        """Dispatch as :class:`services.fabric.link.ExpertLink` says, without waiting for the network.

        Raises:
            ExpertUnavailable: the link is closed.
        """
        hello, device = self._facts.hello, x_TD.device
        assert (x_TD.shape[1], x_TD.dtype) == (hello.hidden, DTYPES[hello.dtype]), "the link is of another model"
        self._rows.count(layer, expert_ids_TK)
        x_TD, weights_TK = x_TD.detach(), weights_TK.detach()
        with self._changed:
            self._by_lane = stays = self._seats.lanes()
        if not stays:
            x_TD, weights_TK = x_TD.cpu(), weights_TK.cpu()
        ids_TK, host_weights_TK = expert_ids_TK.cpu(), weights_TK.cpu()
        with self._changed:
            if self._seats.closed:
                raise ExpertUnavailable("The link to the experts is closed.")
            row_bytes = self._row_bytes(ids_TK.shape[1])
            max_rows = max(1, min(self._seats.max_rows(row_bytes), self._facts.max_bytes // row_bytes))
            number, epoch = next(self._micro_batches), self._table.epoch
            make = partial(TracedDispatch, trace=self._trace) if self._trace else Dispatch
            parts = []
            for rows in split(x_TD, ids_TK, host_weights_TK, self._table.group_of[layer], max_rows):
                dispatch = make(
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
                self._seats.update(parts[-1])
        return TcpHandle(parts, x_TD, weights_TK, device)

    def combine(self, handle: TcpHandle) -> Tensor:
        """Combine as :class:`services.fabric.link.ExpertLink` says.

        Raises:
            ExpertUnavailable: no replica of a group could answer for ``unavailable_s``, or the link is closed.
        """
        with self._changed:
            try:
                while waiting := [part for part in handle.parts if not self._seats.update(part)]:
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

    def stalled_s(self) -> dict[int, float]:
        """Return the seconds that :meth:`combine` has waited, by shard group; groups share the time of one wait."""
        return self._stalls.totals()

    @property
    def transport(self) -> str:
        """``nccl`` where rows to some seat go from device to device, else ``tcp``."""
        return "nccl" if self._by_lane else "tcp"

    def exchanged_bytes(self) -> dict[tuple[str, str], int]:
        """Return the bytes of all connections by transport and direction."""
        return self._facts.byte_counts.totals()

    def resent_rows(self) -> dict[str, int]:
        """Return how many rows were sent again to another replica, by reason."""
        with self._changed:
            return dict(self._seats.resent)

    def trace(self, context: bytes) -> None:
        """Send ``context`` along with the calls that follow."""
        self._trace = context

    def faults(self) -> dict[str, int]:
        """Return how many connections were refused or ended because of what the other side is or sent, by reason."""
        return self._facts.faults.totals()

    def close(self) -> None:
        """End all connections; a ``combine`` that waits raises ExpertUnavailable."""
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
                f"The routing table is for the model {table.fingerprint!r}, not {self._facts.hello.fingerprint!r}.",
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

    def _row_bytes(self, slots: int) -> int:
        """Return the larger number of bytes of a row on its way there and back."""
        width = self._facts.hello.hidden * DTYPES[self._facts.hello.dtype].itemsize
        return max(width + 8 * slots, width if self._reduced else width * slots)


def _identity(seat: Seat) -> tuple[int, str, int, str, int]:
    return seat.number, seat.worker, seat.group, seat.host, seat.port
