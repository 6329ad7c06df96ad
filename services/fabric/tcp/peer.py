"""One authenticated connection: a thread that sends what is queued, frames as they come, a sign of life when idle."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from services.errors import FabricError, SeatLost, WireError
from services.fabric.tcp.frames import Frame, Kind, Limits, Message, frame_parts, read_frame
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.transport import RowTransport, Shipment

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Seconds. ``alive_s``: after so much silence each side says that it lives; ``silence_s``: after so much the other
    one is taken for dead; ``handshake_s``: from connecting to being usable."""

    handshake_s: float = 5.0
    alive_s: float = 2.0
    silence_s: float = 10.0

    def __post_init__(self) -> None:
        assert self.alive_s < self.silence_s, "a live but idle peer would be taken for dead"


@dataclass(slots=True)
class _Outgoing:
    parts: list[memoryview]
    on_sent: Callable[[], None] = field(default=lambda: None)
    shipment: Shipment | None = None


class Peer:
    """Frames go out by :meth:`send` from any thread and come in by :meth:`receive` in one.

    Signs of life flow even while a peer does not read, so one that holds back for want of room is not taken for dead.
    Once it has a lane (:meth:`adopt`), rows may travel there and not in frames, in the order of the frames.

    Args:
        patient: the other side may stop reading on purpose; wait for it as long as it lives.
        version: of all frames, as the handshake agreed on it.
    """

    def __init__(self, stream: Stream, limits: Limits, *, alive_s: float, patient: bool, version: int) -> None:
        self.name = stream.name
        self._stream = stream
        self._limits = limits
        self._alive_s = alive_s
        self._patient = patient
        self._version = version
        self._lane: RowTransport | None = None
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended = False
        self._sender = threading.Thread(target=self._send_all, name=f"send to {self.name}", daemon=True)
        self._sender.start()

    def send(
        self,
        kind: Kind,
        message: Message | None = None,
        tensors: Sequence[Tensor] = (),
        on_sent: Callable[[], None] = lambda: None,
        rows: Tensor | None = None,
        by_lane: bool = False,
    ) -> Shipment | None:
        """Queue a frame. ``on_sent`` is called when it has been sent or never will be.

        Args:
            rows: behind ``tensors``, or ``by_lane``, which there is; the message says which.

        Returns:
            With a patient peer, what to hold until an answer shows that the rows are there.
        """
        shipment = None
        if by_lane and rows is not None and rows.numel():
            assert self._lane is not None
            shipment = self._lane.pack(rows)
        elif rows is not None:
            tensors = [*tensors, rows.cpu()]
        outgoing = _Outgoing(frame_parts(kind, message, tensors, version=self._version), on_sent, shipment)
        with self._lock:
            if not self._ended:
                self._outgoing.put(outgoing)
                return shipment
        on_sent()
        return None

    def receive(self, until: float | None = None) -> Frame:
        """The next frame, signs of life included. Raises as :func:`read_frame`."""
        return read_frame(self._stream, self._limits, until, version=self._version)

    def receive_rows(self, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """``[rows, hidden]`` that the last frame announced on the lane.

        Raises:
            WireError: they are more than allowed, or there is no lane.
            SeatLost: they did not come.
        """
        if self._lane is None:
            raise WireError(f"{self.name} announced rows on a lane that there is not.")
        if not 0 <= rows * hidden * dtype.itemsize <= self._limits.payload:
            raise WireError(f"{self.name} announced {rows} rows on the lane.")
        try:
            with self._lane.reading():
                into = torch.empty(rows, hidden, dtype=dtype, device=self._lane.device)
        except RuntimeError as error:
            raise SeatLost(f"No memory for rows of {self.name}: {error}") from error
        return self.receive_into(into)

    def receive_into(self, into: Tensor) -> Tensor:
        """``into`` filled from the lane, which there is."""
        assert self._lane is not None
        return self._lane.receive(into, deadline_in(self._stream.silence_s), self.broken) if into.numel() else into

    def reading(self) -> AbstractContextManager[Any]:
        """Work on received rows inside does not wait for other work on the device."""
        return nullcontext() if self._lane is None else self._lane.reading()

    @property
    def lane(self) -> RowTransport | None:
        return self._lane

    def adopt(self, lane: RowTransport) -> None:
        """Rows may go by ``lane`` from now on; it ends with the connection."""
        with self._lock:
            ended = self._ended
            self._lane = None if ended else lane
        if ended:
            lane.abort()

    @property
    def local_host(self) -> str:
        return self._stream.local_host

    def broken(self) -> bool:
        return self._stream.broken()

    def finish(self) -> None:
        """End the connection when all that is queued has been sent."""
        self._outgoing.put(None)

    def shut(self) -> None:
        """End the connection now."""
        self._stream.shut()

    def close(self) -> None:
        """Called by the thread that receives, when it stops."""
        self._stream.shut()
        self._outgoing.put(None)
        with self._lock:
            self._ended = True
        if self._lane is not None:
            self._lane.abort()
        self._sender.join()
        self._stream.close()

    def _send_all(self) -> None:
        current: _Outgoing | None = None
        try:
            while (current := self._next()) is not None:
                self._send(current)
                current.on_sent()
        except Exception as error:
            if not isinstance(error, FabricError):
                log.exception("Sending failed.")
            assert current is not None
            current.on_sent()  # the thread that receives meets the same end and tells
        finally:
            self._stream.shut()
            self._abandon_queued()

    def _send(self, outgoing: _Outgoing) -> None:
        shipment, lane = outgoing.shipment, self._lane
        if shipment is not None and lane is not None:
            lane.post(shipment, self.broken)
        self._stream.send(outgoing.parts, patient=self._patient)
        if shipment is not None and lane is not None and not self._patient:
            lane.finish(deadline_in(self._stream.silence_s), self.broken)

    def _next(self) -> _Outgoing | None:
        try:
            return self._outgoing.get(timeout=self._alive_s)
        except queue.Empty:
            return _Outgoing(frame_parts(Kind.ALIVE, version=self._version))

    def _abandon_queued(self) -> None:
        with self._lock:
            self._ended = True
        while not self._outgoing.empty():
            outgoing = self._outgoing.get()
            if outgoing is not None:
                outgoing.on_sent()


def deadline_in(seconds: float) -> float:
    """The monotonic time that many seconds from now."""
    return time.monotonic() + seconds
