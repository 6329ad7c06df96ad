"""Process groups of two over which rows travel, one group per direction: NCCL between GPUs, gloo in tests.

A group runs its operations one after the other. With one group for both directions, both ends would have to issue rows
that go and rows that come in the same order, which nobody can promise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from services.errors import SeatLost
from services.fabric.nccl.pair_store import PairStore

Broken = Callable[[], bool]
"""Returns whether the connection of a lane has ended."""

_NEVER = timedelta(days=1)
"""torch's own deadline, by which it would end the process; the deadlines of this code end a wait."""
_SPIN_S, _NAP_S, _LOOK_S = 3e-4, 5e-5, 1e-3
_GRACE_S = 0.02
"""Grace period after the end of a connection: rows that the peer sent before may still be in flight."""
_ENVIRONMENT = {
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # several communicators on a device launch in the order in which they are called
    "NCCL_LAUNCH_RACE_FATAL": "0",  # only the first use of a new pair races: calls have a lock (see Lane)
    "NCCL_NVLS_ENABLE": "0",  # multicast is of no use to two ranks
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a peer's death concerns its pair, not this process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Transfer(Protocol):
    """A tensor in flight. Its holder keeps the tensor's memory."""

    def finish(self, until: float, broken: Broken) -> None:
        """Wait until the transfer is complete.

        Raises:
            SeatLost: it is not complete by ``until``, a time of the monotonic clock, or the pair broke.
        """
        ...


class Groups(Protocol):
    """Makes and uses the groups of one device."""

    name: str
    device: torch.device

    def identity(self) -> str:
        """Return a name of the device: two ends on one device cannot have a lane."""
        ...

    def make(self, store: PairStore, rank: int, host: str) -> Any:
        """Make a group of two, and wait for the other end; ``host`` is an address of this machine that it reaches."""
        ...

    def stream(self) -> Any:
        """Return a stream for the work of one thread of one lane."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """Let what is computed or allocated inside belong to ``stream``."""
        ...

    def mark(self) -> Any:
        """Return a mark of this moment in the caller's work on the device, for :meth:`reach`."""
        ...

    def reach(self, mark: Any) -> None:
        """Wait until the device's work has come to ``mark``."""
        ...

    def send(self, group: Any, rank: int, rows: Tensor) -> Transfer:
        """Begin to send ``rows`` to ``rank`` of ``group``."""
        ...

    def receive(self, group: Any, rank: int, into: Tensor) -> Transfer:
        """Begin to fill ``into`` with what ``rank`` of ``group`` sends."""
        ...

    def abort(self, group: Any) -> None:
        """End the group, whatever the other end does, and wait until the device has finished its work there."""
        ...


class NcclGroups:
    """Groups over NCCL, between GPUs.

    Args:
        max_ctas: largest number of thread blocks that one transfer takes from the kernels that compute.
    """

    name = "nccl"

    def __init__(self, device: torch.device, *, max_ctas: int = 16) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._max_ctas = max_ctas
        for name, value in _ENVIRONMENT.items():  # for NCCL and torch, which read it when the first group is made
            os.environ.setdefault(name, value)

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def make(self, store: PairStore, rank: int, host: str) -> Any:  # noqa: ARG002  NCCL finds its own way
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        options.config.max_ctas = self._max_ctas
        options.global_ranks_in_group = [0, 1]
        with torch.cuda.device(self.device):
            return dist.ProcessGroupNCCL(store, rank, 2, options)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def reach(self, mark: torch.cuda.Event) -> None:
        while not mark.query():  # type: ignore[no-untyped-call]
            time.sleep(0)

    def send(self, group: Any, rank: int, rows: Tensor) -> Transfer:
        return self._transfer(group.send([rows], rank, 0), rows)

    def receive(self, group: Any, rank: int, into: Tensor) -> Transfer:
        return self._transfer(group.recv([into], rank, 0), into)

    def abort(self, group: Any) -> None:
        group.abort()

    def _transfer(self, work: Any, rows: Tensor) -> Transfer:
        """Return a transfer with an event of its own: torch calls failed work completed, too."""
        work.wait()  # the stream waits, not this thread
        return _NcclTransfer(self.mark(), rows)


class _NcclTransfer:
    def __init__(self, through: torch.cuda.Event, rows: Tensor) -> None:
        self._through, self._rows = through, rows

    def finish(self, until: float, broken: Broken) -> None:
        spin_until = look_at = time.monotonic() + _SPIN_S
        while not self._through.query():  # type: ignore[no-untyped-call]
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_S
                if broken():
                    until = min(until, now + _GRACE_S)
                if now >= until:
                    raise SeatLost("The other end of an NCCL lane is gone, or took too long.")
            time.sleep(0 if now < spin_until else _NAP_S)
