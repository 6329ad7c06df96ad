"""One authenticated connection: a thread sends queued frames, and a sign of life when idle; the owner receives."""

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
from services.fabric.byte_counts import ByteCounts
from services.fabric.tcp.frames import Frame, Kind, Limits, Message, frame_parts, read_frame
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.transport import RowTransport

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """Timeouts of a connection, in seconds: from connecting to being usable (``handshake_s``), between signs of life
    (``alive_s``), and of silence after which the other side counts as dead.
    """

    handshake_s: float = 5.0
    alive_s: float = 2.0
    silence_s: float = 10.0

    def __post_init__(self) -> None:
        assert self.alive_s < self.silence_s, "a live but idle peer would be taken for dead"


@dataclass(slots=True)
class _Outgoing:
    parts: list[memoryview]
    on_sent: Callable[[], None] = field(default=lambda: None)
    shipment: object | None = None
    shipped: int = 0
    """Bytes of ``shipment``."""


class Peer:
    """Sends frames from any thread and receives them in one.

    A peer that does not read for want of room still sends signs of life, and so does not count as dead. With a lane
    (:meth:`adopt`) rows may travel there and not in frames, in the order of the frames.

    Args:
        may_pause: the other side may stop reading on purpose; sends wait for it as long as the connection lives.
        version: version of all frames, from the handshake.
        byte_counts: counts what is sent and received.
    """

    def __init__(
        self,
        stream: Stream,
        limits: Limits,
        *,
        alive_s: float,
        may_pause: bool,
        version: int,
        byte_counts: ByteCounts | None = None,
    ) -> None:
        self.name, self.local_host = stream.name, stream.local_host
        self._stream = stream
        self._limits = limits
        self._alive_s = alive_s
        self._may_pause = may_pause
        self._version = version
        self._bytes = byte_counts or ByteCounts()
        self.lane: RowTransport | None = None
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
    ) -> object | None:
        """Queue a frame; return at once.

        Args:
            on_sent: called when the frame has been sent or never will be.
            rows: the last part of the payload or, ``by_lane``, rows for the lane; ``message`` says which.

        Returns:
            Rows on the lane, which the caller of a peer that may pause holds until an answer shows that they arrived.
        """
        shipment, shipped = None, 0
        if by_lane and rows is not None and rows.numel():
            assert self.lane is not None
            shipment, shipped = self.lane.pack(rows), rows.nbytes
        elif rows is not None:
            tensors = [*tensors, rows.cpu()]
        outgoing = _Outgoing(frame_parts(kind, message, tensors, version=self._version), on_sent, shipment, shipped)
        with self._lock:
            if not self._ended:
                self._outgoing.put(outgoing)
                return shipment
        on_sent()
        return None

    def receive(self, until: float | None = None) -> Frame:
        """Return the next frame, which may be a sign of life. It raises the errors of :func:`read_frame`."""
        frame = read_frame(self._stream, self._limits, until, version=self._version)
        self._bytes.add("tcp", "received", frame.nbytes)
        return frame

    def receive_rows(self, rows: int, hidden: int, dtype: torch.dtype) -> Tensor:
        """Return the rows ``[rows, hidden]`` that the last frame announced on the lane, on the lane's device.

        Raises:
            WireError: they are more than allowed, or there is no lane.
            SeatLost: they did not come, or there is no memory for them.
        """
        if self.lane is None:
            raise WireError(f"{self.name} announced rows on a lane that does not exist.")
        if not 0 <= rows * hidden * dtype.itemsize <= self._limits.payload:
            raise WireError(f"{self.name} announced {rows} rows on the lane, more than allowed.")
        try:
            with self.lane.reading():
                into = torch.empty(rows, hidden, dtype=dtype, device=self.lane.device)
        except RuntimeError as error:
            raise SeatLost(f"No memory for rows of {self.name}: {error}") from error
        return self.receive_into(into)

    def receive_into(self, into: Tensor) -> Tensor:
        """Fill ``into`` with the next rows of the lane, and return it."""
        assert self.lane is not None
        if not into.numel():
            return into
        self._bytes.add("nccl", "received", into.nbytes)
        return self.lane.receive(into, deadline_in(self._stream.silence_s), self.broken)

    def reading(self) -> AbstractContextManager[Any]:
        """Let work on received rows inside not wait for other work on the device."""
        return nullcontext() if self.lane is None else self.lane.reading()

    def adopt(self, lane: RowTransport) -> None:
        """Let rows go by ``lane`` from now on; it ends with the connection."""
        with self._lock:
            ended = self._ended
            self.lane = None if ended else lane
        if ended:
            lane.abort()

    def broken(self) -> bool:
        """Return :meth:`services.fabric.tcp.stream.Stream.broken`."""
        return self._stream.broken()

    def finish(self) -> None:
        """End the connection when all that is queued has been sent."""
        self._outgoing.put(None)

    def shut(self) -> None:
        """End the connection now."""
        self._stream.shut()

    def close(self) -> None:
        """End the connection and wait for the sending thread. Only the receiving thread calls this, at its end."""
        self._stream.shut()
        self._outgoing.put(None)
        with self._lock:
            self._ended = True
        if self.lane is not None:
            self.lane.abort()
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
                log.exception("sending to %s failed", self.name)
            assert current is not None
            current.on_sent()  # the thread that receives meets the same end, and reports it
        finally:
            self._stream.shut()
            self._abandon_queued()

    def _send(self, outgoing: _Outgoing) -> None:
        shipment, lane = outgoing.shipment, self.lane
        if shipment is not None and lane is not None:
            lane.post(shipment, self.broken)
            self._bytes.add("nccl", "sent", outgoing.shipped)
        self._stream.send(outgoing.parts, no_timeout=self._may_pause)
        self._bytes.add("tcp", "sent", sum(map(len, outgoing.parts)))
        if shipment is not None and lane is not None and not self._may_pause:
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
    """Return the time of the monotonic clock in ``seconds`` from now."""
    return time.monotonic() + seconds
