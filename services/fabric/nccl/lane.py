"""The lane beside a connection: rows go from device to device, the frames that announce them over the connection.

Both ends issue the transfers of a direction in the order of its frames. A frame is sent after its transfer was issued,
so whoever receives waits only for what is on its way.

NCCL orders the kernels of all communicators on a device as they were launched: one that cannot start yet holds up every
pair. So a transfer is launched only when it can start at once: its rows are computed, and the one before it in its
direction is through. Then a slow or dead peer costs its own pair alone.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from services.errors import SeatLost
from services.fabric.nccl.pair_store import PairStore
from services.fabric.nccl.process_groups import Broken, Groups, Transfer

log = logging.getLogger(__name__)

ATTENTION, EXPERTS = 0, 1
"""Ranks in a pair: who connected, who listened."""
_NEVER = float("inf")
_LAUNCH_S = 1.0
"""Longest wait for a launch that began before the lane was ended."""
_LATE_S = 10.0
"""An end that takes longer is told."""


@dataclass(slots=True, eq=False)
class Shipment:
    """Rows to send. Whoever holds this keeps their memory until they are through."""

    rows: Tensor
    ready: Any
    """When they are computed, on the device."""
    transfer: Transfer | None = None


class Launches:
    """One device's: transfers of all lanes are launched one at a time, in one order (NCCL asks for it)."""

    def __init__(self) -> None:
        self.turn = threading.Lock()
        self._lock = threading.Lock()
        self._ends: list[threading.Thread] = []

    def end(self, work: Callable[[], None]) -> None:
        """``work``, which ends a lane, beside the caller."""
        thread = threading.Thread(target=work, name="end of a lane", daemon=True)
        with self._lock:
            self._ends = [other for other in self._ends if other.is_alive()] + [thread]
            thread.start()

    def wait_ended(self, seconds: float) -> bool:
        """Whether all ends that have begun are done in that time: in a process that exits meanwhile NCCL would find
        no driver."""
        until = time.monotonic() + seconds
        with self._lock:
            ends = list(self._ends)
        for thread in ends:
            thread.join(max(0.0, until - time.monotonic()))
        return not any(thread.is_alive() for thread in ends)


class Lane:
    """One thread calls :meth:`post` and :meth:`finish`, another one :meth:`receive`; :meth:`abort` any.

    Args:
        stores: for the rows that go from attention to experts, and for those that come back.
        rank: ATTENTION or EXPERTS.
        host: an address of this machine that the other end reaches.
    """

    def __init__(
        self, groups: Groups, launches: Launches, stores: tuple[PairStore, PairStore], rank: int, host: str
    ) -> None:
        self._groups, self._launches = groups, launches
        self._other = 1 - rank
        self._stores = stores  # torch keeps only their C++ half
        made: list[Any] = []
        try:
            made += [groups.make(store, rank, host) for store in stores]
        except RuntimeError as error:
            raise SeatLost(f"No {groups.name} lane: {str(error).splitlines()[0][:300]}") from error
        self._out, self._in = made if rank == ATTENTION else made[::-1]
        self._sending, self._receiving = groups.stream(), groups.stream()
        self._last: Shipment | None = None
        self._into: Tensor | None = None
        self._aborted = threading.Event()

    @property
    def device(self) -> torch.device:
        return self._groups.device

    def pack(self, rows: Tensor) -> Shipment:
        """``rows``, as they are once the caller's work on the device is done."""
        rows = rows.to(self.device).contiguous()
        return Shipment(rows, self._groups.mark())

    def post(self, shipment: Shipment, broken: Broken, *, first: bool = False) -> None:
        """Issue the transfer once the one before is through, for as long as the peer lives.

        Args:
            first: of this group, which may take a second.
        """
        self.finish(_NEVER, broken)
        self._groups.reach(shipment.ready)
        with self._groups.on(self._sending):
            shipment.transfer = self._issue(self._groups.send, self._out, shipment.rows, first)
        self._last = shipment

    def finish(self, until: float, broken: Broken) -> None:
        """Return once what was posted is through. Raises SeatLost as :meth:`receive`."""
        if self._last is not None:
            assert self._last.transfer is not None
            self._finish(self._last.transfer, until, broken)
            self._last = None

    def receive(self, into: Tensor, until: float, broken: Broken, *, first: bool = False) -> Tensor:
        """``into``, made under :meth:`reading`, filled with what the next frame announced.

        Raises:
            SeatLost: it did not come by the monotonic time ``until``, or the pair broke.
        """
        self._into = into  # after an error it may still be written to until the lane is ended
        with self.reading():
            self._finish(self._issue(self._groups.receive, self._in, into, first), until, broken)
        self._into = None
        return into

    def reading(self) -> AbstractContextManager[Any]:
        """What is computed or allocated inside does not wait for the caller's own work on the device."""
        return self._groups.on(self._receiving)

    def abort(self) -> None:
        """End every wait on the pair now, and the pair beside the caller, whom neither device nor peer can hold up.

        Twice is once.
        """
        if self._aborted.is_set():
            return
        self._aborted.set()
        for store in self._stores:
            store.close()
        groups, self._out, self._in = (self._out, self._in), None, None
        self._launches.end(lambda: self._end(groups))

    def _end(self, groups: tuple[Any, Any]) -> None:
        """Holds what was under way, which the device may still read or write, until both groups are gone.

        At the same time: freeing one group waits for the device, so for kernels of the other that wait for the dead
        peer until their own group is aborted (pytorch/pytorch#119797).
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
            log.warning("A %s lane is not ended after %g s; its memory stays in use.", self._groups.name, _LATE_S)
        for end in ends:
            end.join()
        log.debug("A %s lane was ended in %.3f s.", self._groups.name, time.monotonic() - began)

    def _issue(self, operation: Any, group: Any, rows: Tensor, first: bool) -> Transfer:
        self._refuse_if_aborted()
        try:
            if first:  # it waits for the other end, which no other lane must wait for
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
        self._refuse_if_aborted()  # the end of a transfer says nothing then

    def _refuse_if_aborted(self) -> None:
        if self._aborted.is_set():
            raise SeatLost("The lane was ended.")
