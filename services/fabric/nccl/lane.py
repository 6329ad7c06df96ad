"""A lane: rows of a connection go from device to device, and the frames that announce them over the connection.

Both ends issue the transfers of a direction in the order of its frames. A frame is sent after its transfer was issued,
so that the receiver waits only for rows in flight.

NCCL runs the kernels of all communicators on a device in the order of their launch: a kernel that cannot start yet
blocks every pair. So a transfer is launched only when it can start at once: when its rows are computed and the transfer
before it in its direction is complete. Then a slow or dead peer delays its own pair alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from services.errors import SeatLost
from services.fabric.nccl.pair_store import PairStore
from services.fabric.nccl.process_groups import Broken, Groups, Transfer

log = logging.getLogger(__name__)

ATTENTION, EXPERTS = 0, 1
"""Ranks in a pair: the end that connected, and the end that listened."""
_NEVER = float("inf")
_LAUNCH_S = 1.0
"""Longest wait for a launch that began before the lane was ended."""
_LATE_S = 10.0
"""The end of a lane is logged as a warning if it takes longer."""


@dataclass(slots=True, eq=False)
class Shipment:
    """Rows to send. Its holder keeps their memory until the transfer is complete."""

    rows: Tensor
    ready: Any
    """A mark on the device: the rows are computed when the device reaches it."""
    transfer: Transfer | None = None


class Launches:
    """The order of launches on one device: NCCL wants transfers of all lanes launched one at a time, in one order."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._lock = threading.Lock()
        self._ends: list[threading.Thread] = []

    def end(self, work: Callable[[], None]) -> None:
        """Run ``work``, which ends a lane, in a thread of its own."""
        thread = threading.Thread(target=work, name="end of a lane", daemon=True)
        with self._lock:
            self._ends = [other for other in self._ends if other.is_alive()] + [thread]
            thread.start()

    def wait_ended(self, seconds: float) -> bool:
        """Return whether all ends of lanes that have begun are done within ``seconds``.

        Wait for them before the process exits: NCCL would find no driver.
        """
        until = time.monotonic() + seconds
        with self._lock:
            ends = list(self._ends)
        for thread in ends:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in ends)


class Lane:
    """A :class:`services.fabric.tcp.transport.RowTransport` of two groups.

    Args:
        stores: the group's store for rows from attention to experts, and that for rows that come back.
        rank: ATTENTION or EXPERTS.
        host: an address of this machine that the other end reaches.

    Raises:
        SeatLost: the groups could not be made.
    """

    def __init__(
        self, groups: Groups, launches: Launches, stores: tuple[PairStore, PairStore], rank: int, host: str
    ) -> None:
        self._groups, self._launches = groups, launches
        self.device = groups.device
        self._other = 1 - rank
        self._stores = stores  # torch keeps only their C++ half
        made: list[Any] = []
        try:
            made += [groups.make(store, rank, host) for store in stores]
        except RuntimeError as error:
            raise SeatLost(f"The {groups.name} group was not made: {str(error).splitlines()[0][:300]}") from error
        self._out, self._in = made if rank == ATTENTION else made[::-1]
        self._sending, self._receiving = groups.stream(), groups.stream()
        self._last: Shipment | None = None
        self._into: Tensor | None = None
        self._aborted = threading.Event()

    def pack(self, rows: Tensor) -> Shipment:
        rows = rows.to(self.device).contiguous()
        return Shipment(rows, self._groups.mark())

    def post(self, shipment: Shipment, broken: Broken, *, first: bool = False) -> None:
        """Issue the transfer once the last one is complete; wait for that as long as the peer lives.

        Args:
            first: the transfer is the first one of its group, which may take a second.
        """
        self.finish(_NEVER, broken)
        self._groups.reach(shipment.ready)
        with self._groups.on(self._sending):
            shipment.transfer = self._issue(self._groups.send, self._out, shipment.rows, first)
        self._last = shipment

    def finish(self, until: float, broken: Broken) -> None:
        if self._last is not None:
            assert self._last.transfer is not None
            self._finish(self._last.transfer, until, broken)
            self._last = None

    def receive(self, into: Tensor, until: float, broken: Broken, *, first: bool = False) -> Tensor:
        """Fill ``into``, which was made under :meth:`reading`, with the rows of the next frame, and return it.

        Raises:
            SeatLost: they did not come by ``until``, or the pair broke.
        """
        self._into = into  # after an error it may still be written to until the lane is ended
        with self.reading():
            self._finish(self._issue(self._groups.receive, self._in, into, first), until, broken)
        self._into = None
        return into

    def reading(self) -> AbstractContextManager[Any]:
        return self._groups.on(self._receiving)

    def abort(self) -> None:
        """End every wait on the pair at once, and the pair in another thread, which device and peer may delay."""
        if self._aborted.is_set():
            return
        self._aborted.set()
        for store in self._stores:
            store.close()
        groups, self._out, self._in = (self._out, self._in), None, None
        self._launches.end(lambda: self._end(groups))

    def _end(self, groups: tuple[Any, Any]) -> None:
        """Hold rows in flight, which the device may still read or write, until both groups are gone.

        Both groups end at the same time: freeing one of them waits for the device, and so for kernels of the other one,
        which wait for the dead peer until their own group is aborted (pytorch/pytorch#119797).
        """
        if self._launches.turn.acquire(timeout=_LAUNCH_S):
            self._launches.turn.release()
        began = time.monotonic()
        ends = [threading.Thread(target=self._groups.abort, args=(group,), daemon=True) for group in groups]
        for end in ends:
            end.start()
        for end in ends:
            end.join(max(0.0, began + _LATE_S - time.monotonic()))
        if any(end.is_alive() for end in ends):
            log.warning("a %s lane has not shut down after %g s; its memory stays in use", self._groups.name, _LATE_S)
        for end in ends:
            end.join()
        log.debug("shut down a %s lane in %.3f s", self._groups.name, time.monotonic() - began)

    def _issue(self, operation: Any, group: Any, rows: Tensor, first: bool) -> Transfer:
        self._refuse_if_aborted()
        try:
            if first:  # it waits for the other end, and other lanes must not wait for that
                transfer = operation(group, self._other, rows)
            else:
                with self._launches.turn:
                    self._refuse_if_aborted()  # while this waited for its turn
                    transfer = operation(group, self._other, rows)
        except RuntimeError as error:
            raise SeatLost(f"The {self._groups.name} lane broke: {str(error).splitlines()[0][:300]}") from error
        assert hasattr(transfer, "finish")
        return transfer  # type: ignore[no-any-return]

    def _finish(self, transfer: Transfer, until: float, broken: Broken) -> None:
        transfer.finish(until, lambda: self._aborted.is_set() or broken())
        self._refuse_if_aborted()  # a transfer of an aborted lane ends, too

    def _refuse_if_aborted(self) -> None:
        if self._aborted.is_set():
            raise SeatLost("The lane was closed.")
