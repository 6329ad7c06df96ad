"""How the rows of one connection may travel outside its frames, from device to device.

:mod:`services.fabric.nccl.lane` is the implementation; the tcp code knows it by this file alone.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor


class RowTransport(Protocol):
    """Two queues of rows, one to the other end and one from it, in the order of the frames that announce them.

    One thread calls ``post`` and ``finish``, another one ``receive``; any thread may call ``abort``. ``broken`` returns
    whether the connection has ended; ``until`` is a time of the monotonic clock.
    """

    @property
    def device(self) -> torch.device:
        """Device that rows are sent from and received on."""
        ...

    def pack(self, rows: Tensor) -> Any:
        """Return a shipment of ``rows`` as they are once the caller's work on the device is done.

        Hold it until the transfer is complete: it keeps the memory of the rows.
        """
        ...

    def post(self, shipment: Any, broken: Callable[[], bool]) -> None:
        """Begin to send a shipment once the last one is complete. Raises SeatLost where the pair broke."""
        ...

    def finish(self, until: float, broken: Callable[[], bool]) -> None:
        """Wait until the last shipment is complete. Raises SeatLost where it is not by ``until``, or the pair broke."""
        ...

    def receive(self, into: Tensor, until: float, broken: Callable[[], bool]) -> Tensor:
        """Fill ``into`` with the next rows and return it. Raises SeatLost as :meth:`finish`."""
        ...

    def reading(self) -> AbstractContextManager[Any]:
        """Let work inside, on received rows, not wait for the caller's other work on the device."""
        ...

    def abort(self) -> None:
        """End every wait of the transport, at both ends. A second call does nothing."""
        ...
