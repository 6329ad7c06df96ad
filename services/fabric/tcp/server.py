"""The expert worker's end of the tcp fabric: rows of any attention worker in, the outputs of its experts out.

accept -> one thread per connection reads frames -> bounded inbox -> one thread computes -> one thread per connection
sends. No call waits for another attention worker (ExpertFlow, section 3.2).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial

import msgspec
from torch import Tensor

from services.errors import CallFailed, FabricError, SeatLeaving, WireError
from services.fabric.faults import Faults
from services.fabric.tcp.compute import CallTraces, Compute, ComputeLoop, Counts
from services.fabric.tcp.extension import ServerExtension
from services.fabric.tcp.frames import (
    DTYPES,
    ECHO_BYTES,
    HEADER_BYTES,
    MAX_BYTES,
    NAMES,
    Answer,
    Dispatch,
    Echo,
    Failed,
    Frame,
    Kind,
    Limits,
    TracedDispatch,
    message_of,
    unpack_dispatch,
)
from services.fabric.tcp.handshake import Hello, Refused, admit, check_facts, refusal
from services.fabric.tcp.inbox import Call, Inbox
from services.fabric.tcp.peer import Peer, Timing, deadline_in
from services.fabric.tcp.reception import Arrival, Reception
from services.fabric.tcp.stream import Stream, listen
from services.fabric.tcp.tls import ServerTls
from services.fabric.tcp.versions import SPOKEN, Versions

log = logging.getLogger(__name__)


class ExpertServer:
    """Serves one seat from :meth:`start` until :meth:`drain` or :meth:`close`.

    Args:
        compute: called in one thread alone, under inference mode.
        experts: layer -> ids of the experts held here; a call for others fails.
        hello: what this worker says of itself; ``max_rows`` and ``max_bytes`` are filled in here.
        secret: shared by all workers of the cluster.
        inbox_rows: largest number of rows accepted and not yet answered, over all connections.
        join_rows: largest number of rows of one computation for several calls.
        max_bytes: largest payload accepted.
        max_connections: largest number of proven connections; others have a bound of their own.
        tls: encrypts connections; None for plain ones.
        extensions: asked in this order to take frames that do not belong to this file.
        spoken: versions of the protocol that this worker speaks.
        faults: counts refused peers by reason.
        traces: takes what was computed, where anything is traced.
    """

    def __init__(
        self,
        compute: Compute,
        *,
        experts: Mapping[int, Collection[int]],
        hello: Hello,
        secret: bytes,
        host: str = "127.0.0.1",
        port: int = 0,
        inbox_rows: int = 8192,
        join_rows: int = 2048,
        max_bytes: int = MAX_BYTES,
        max_connections: int = 256,
        timing: Timing | None = None,
        tls: ServerTls | None = None,
        extensions: Sequence[ServerExtension] = (),
        spoken: Versions = SPOKEN,
        faults: Faults | None = None,
        traces: CallTraces | None = None,
    ) -> None:
        check_facts(hello, secret)
        self._hello = msgspec.structs.replace(hello, max_rows=inbox_rows, max_bytes=max_bytes)
        self._extensions = tuple(extensions)
        for extension in self._extensions:
            self._hello = extension.offered(self._hello)
        self._experts = {layer: frozenset(ids) for layer, ids in experts.items()}
        self._secret = secret
        self._timing = timing or Timing()
        self._tls = tls
        self._spoken = spoken
        self._limits = Limits(header=HEADER_BYTES, payload=max_bytes)
        self._inbox = Inbox(inbox_rows, join_rows)
        self._loop = ComputeLoop(compute, self._inbox, traces)
        self.counts: Counts = self._loop.counts
        self._lock = threading.Lock()
        self._peers: set[Peer] = set()
        self._leaving = False
        self.failure: BaseException | None = None
        """The error that ended a thread. The server then answers no more, and its calls go to replicas at once."""
        self._listener = listen(host, port)
        self.faults = faults or Faults()
        self._reception = Reception(
            self._listener, self._converse, who="attention worker", faults=self.faults, max_proven=max_connections
        )
        self._threads = [
            threading.Thread(target=self._guard, args=(self._reception.run,), name="experts accept", daemon=True),
            threading.Thread(target=self._guard, args=(self._loop.run,), name="experts compute", daemon=True),
        ]

    def start(self) -> None:
        """Accept connections and compute calls from now on."""
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def rows_in_flight(self) -> int:
        return self._inbox.rows_in_flight

    @property
    def waited_s(self) -> float:
        return self._inbox.waited_s

    def drain(self, seconds: float) -> bool:
        """Refuse new calls, answer those that are here, close; return whether all were answered within ``seconds``."""
        with self._lock:
            self._leaving = True
            peers = list(self._peers)
        self._reception.stop()
        for peer in peers:
            peer.send(Kind.LEAVING)
        finished = self._inbox.wait_idle(seconds) and all(other.wait_idle(seconds) for other in self._extensions)
        for peer in peers:
            peer.finish()
        self.close()
        return finished

    def close(self) -> None:
        """End every connection and thread; calls in flight get no answer."""
        for thread in [*self._threads, *self._end_connections()]:
            if thread.ident is not None:
                thread.join(self._timing.handshake_s)
        self._reception.close()
        for extension in self._extensions:
            extension.close()

    def _end_connections(self) -> list[threading.Thread]:
        """End all connections; return their threads."""
        with self._lock:
            self._leaving = True
            peers = list(self._peers)
        self._inbox.close()
        for peer in peers:
            peer.shut()
        return self._reception.end()

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the thread's boundary: the server's owner reads `failure`
            self.failure = error
            log.critical("seat %d has stopped serving", self._hello.seat, exc_info=error)
            self._end_connections()

    def _converse(self, arrival: Arrival) -> None:
        until = deadline_in(self._timing.handshake_s)
        if self._tls is not None:
            arrival.sock.settimeout(self._timing.handshake_s)
            arrival.sock = encrypted = self._tls.wrap(arrival.sock)
            encrypted.do_handshake()
        stream = Stream(arrival.sock, silence_s=self._timing.silence_s, name=arrival.name)
        proven = partial(self._prove, arrival)
        agreed = admit(stream, self._secret, self._hello, until, spoken=self._spoken, proven=proven)
        peer = Peer(stream, self._limits, alive_s=self._timing.alive_s, may_pause=False, version=agreed.version)
        try:
            for extension in self._extensions:
                extension.opened(peer, agreed.theirs)
            self._follow(peer)
        finally:
            with self._lock:
                self._peers.discard(peer)
            for extension in self._extensions:
                extension.lost(peer)
            peer.close()

    def _prove(self, arrival: Arrival) -> None:
        if self._leaving:
            raise SeatLeaving(f"Seat {self._hello.seat} is leaving.", hint="Use another replica.")
        self._reception.prove(arrival)

    def _follow(self, peer: Peer) -> None:
        with self._lock:
            self._peers.add(peer)
            leaving = self._leaving
        if leaving:
            peer.send(Kind.LEAVING)
        while True:
            self._take(peer, peer.receive())

    def _take(self, peer: Peer, frame: Frame) -> None:
        if frame.kind == Kind.DISPATCH:
            self._dispatch(peer, frame)
        elif frame.kind == Kind.ECHO:
            peer.send(Kind.ECHO, _checked_echo(frame, peer.name), [frame.payload])
        elif frame.kind == Kind.REFUSED:
            raise refusal(message_of(frame, Refused), peer.name)
        elif frame.kind != Kind.ALIVE and not any(extension.take(peer, frame) for extension in self._extensions):
            raise WireError(f"{peer.name} sent {frame.kind.name}, which expert workers do not accept.")

    def _dispatch(self, peer: Peer, frame: Frame) -> None:
        facts = message_of(frame, TracedDispatch)
        hidden, dtype = self._hello.hidden, DTYPES[self._hello.dtype]
        came_RD = peer.receive_rows(facts.rows, hidden, dtype) if facts.lane else None
        x_RD, ids_RK, weights_RK = unpack_dispatch(frame, facts, hidden, dtype, came_RD)
        if not facts.reduced and len(x_RD) > 1 and x_RD.nbytes * facts.slots > self._limits.payload:
            raise WireError(f"{peer.name} asked for more than {self._limits.payload} bytes of answers.")
        if self._leaving:
            _fail(peer, facts.call, SeatLeaving(f"Seat {self._hello.seat} is leaving.", hint="Use another replica."))
            return
        held = self._experts.get(facts.layer)
        if held is None or (unknown := set(ids_RK.flatten().tolist()) - {-1} - held):
            which = "any expert" if held is None else f"experts {sorted(unknown)[:8]}"
            problem = f"Seat {self._hello.seat} does not hold {which} of layer {facts.layer}."
            _fail(peer, facts.call, CallFailed(problem, hint="Is the routing table older than the worker?"))
            return
        call = Call(
            layer=facts.layer,
            reduced=facts.reduced,
            x_RD=x_RD,
            ids_RK=ids_RK,
            weights_RK=weights_RK,
            answer=lambda result: self._answer(peer, facts, call, result),
            traced=facts if facts.trace else None,
            came_ns=time.time_ns() if facts.trace else 0,
        )
        self._inbox.put(call)

    def _answer(self, peer: Peer, facts: Dispatch, call: Call, result: Tensor | Exception) -> None:
        release = partial(self._inbox.release, call)
        if isinstance(result, Exception):
            problem = f"Seat {self._hello.seat} failed in layer {facts.layer}: {type(result).__name__}: {result}"
            _fail(peer, facts.call, CallFailed(problem[:1000]))
            release()
            return
        answer = Answer(call=facts.call, rows=len(result), dtype=NAMES[result.dtype], lane=facts.lane)
        peer.send(Kind.ANSWER, answer, rows=result, on_sent=release, by_lane=facts.lane)


def _checked_echo(frame: Frame, name: str) -> Echo:
    """Decode an echo and bound its size: unlike answers, echoes that wait to be sent have no other bound."""
    if len(frame.payload) > ECHO_BYTES:
        raise WireError(f"{name} asked for an echo of {len(frame.payload)} bytes; at most {ECHO_BYTES} are allowed.")
    return message_of(frame, Echo)


def _fail(peer: Peer, call: int, error: FabricError) -> None:
    peer.send(Kind.FAILED, Failed(call=call, code=error.code, message=error.message))
