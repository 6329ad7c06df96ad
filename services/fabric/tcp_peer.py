"""One authenticated connection: a thread that sends what is queued, frames as they come, a sign of life when idle."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from services.errors import FabricError
from services.fabric.tcp_stream import Stream
from services.fabric.tcp_wire import Frame, Kind, Limits, Message, frame_parts, read_frame


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


class Peer:
    """Frames go out by :meth:`send` from any thread and come in by :meth:`receive` in one.

    Signs of life flow even while a peer does not read, so one that holds back for want of room is not taken for dead.

    Args:
        patient: the other side may stop reading on purpose; wait for it as long as it lives.
    """

    def __init__(self, stream: Stream, limits: Limits, *, alive_s: float, patient: bool) -> None:
        self.name = stream.name
        self._stream = stream
        self._limits = limits
        self._alive_s = alive_s
        self._patient = patient
        self._outgoing: queue.SimpleQueue[_Outgoing | None] = queue.SimpleQueue()
        self._gate = threading.Lock()
        self._ended = False
        self._sender = threading.Thread(target=self._send_all, name=f"send to {self.name}", daemon=True)
        self._sender.start()

    def send(
        self,
        kind: Kind,
        message: Message | None = None,
        tensors: Sequence[Tensor] = (),
        on_sent: Callable[[], None] = lambda: None,
    ) -> None:
        """Queue a frame. ``on_sent`` is called when it has been sent or never will be."""
        outgoing = _Outgoing(frame_parts(kind, message, tensors), on_sent)
        with self._gate:
            if not self._ended:
                self._outgoing.put(outgoing)
                return
        on_sent()

    def receive(self, until: float | None = None) -> Frame:
        """The next frame, signs of life included. Raises as :func:`read_frame`."""
        return read_frame(self._stream, self._limits, until)

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
        self._sender.join()
        self._stream.close()

    def _send_all(self) -> None:
        current: _Outgoing | None = None
        try:
            while (current := self._next()) is not None:
                self._stream.send(current.parts, patient=self._patient)
                current.on_sent()
        except FabricError:
            assert current is not None
            current.on_sent()  # the thread that receives meets the same end and tells
        finally:
            self._stream.shut()
            self._abandon_queued()

    def _next(self) -> _Outgoing | None:
        try:
            return self._outgoing.get(timeout=self._alive_s)
        except queue.Empty:
            return _Outgoing(frame_parts(Kind.ALIVE))

    def _abandon_queued(self) -> None:
        with self._gate:
            self._ended = True
        while not self._outgoing.empty():
            outgoing = self._outgoing.get()
            if outgoing is not None:
                outgoing.on_sent()


def soon(seconds: float) -> float:
    """The monotonic time that many seconds from now."""
    return time.monotonic() + seconds
