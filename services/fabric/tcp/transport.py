"""How the rows of one connection may travel beside its frames, from device to device.

:mod:`services.fabric.nccl.lane` is the implementation; a connection knows no more of it than this.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class Shipment(Protocol):
    """Rows to send. Whoever holds a shipment keeps the memory of its rows until they are through."""

    @property
    def rows(self) -> Tensor: ...


class RowTransport(Protocol):
    """A pair of queues for rows, one to the other end and one from it, in the order of the frames that announce them.

    One thread calls ``post`` and ``finish``, another one ``receive``; any thread may call ``abort``. ``broken`` says
    whether the connection has ended; ``until`` is a time of the monotonic clock.
    """

    @property
    def device(self) -> torch.device:
        """The device that rows are sent from and received on."""
        ...

    def pack(self, rows: Tensor) -> Any:
        """A :class:`Shipment` of ``rows`` as they are once the caller's work on the device is done."""
        ...

    def post(self, shipment: Any, broken: Callable[[], bool]) -> None:
        """Begin to send a shipment once the one before is through."""
        ...

    def finish(self, until: float, broken: Callable[[], bool]) -> None:
        """Wait until what was posted is through."""
        ...

    def receive(self, into: Tensor, until: float, broken: Callable[[], bool]) -> Tensor:
        """Fill ``into`` with the next rows and return it."""
        ...

    def reading(self) -> AbstractContextManager[Any]:
        """Work on received rows inside this context does not wait for other work on the device."""
        ...

    def abort(self) -> None:
        """End every wait of the transport, at both ends. Calling it twice does no harm."""
        ...
