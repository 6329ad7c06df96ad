"""The expert worker's end of the tcp fabric: rows of any attention worker in, what its experts make of them out.

accept -> one thread per connection reads frames -> bounded inbox -> one thread computes -> one thread per connection
sends. No call waits for another attention worker (ExpertFlow, section 3.2).
"""

from __future__ import annotations

import logging
import socket
import ssl
import threading
from collections.abc import Callable, Collection, Mapping
from functools import partial

import msgspec
from torch import Tensor

from services.errors import CallFailed, ExpertMeshError, FabricError, SeatLeaving, SeatLost, WireError
from services.fabric.nccl_setup import Lanes, Opening
from services.fabric.nccl_weights import LayerTensors, give
from services.fabric.symm_host import SymmHost
from services.fabric.tcp_compute import Compute, ComputeLoop, Counts
from services.fabric.tcp_handshake import Hello, Refused, admit, check_facts, refusal
from services.fabric.tcp_inbox import Call, Inbox
from services.fabric.tcp_peer import Peer, Timing, soon
from services.fabric.tcp_stream import Stream, listen, shut_socket
from services.fabric.tcp_wire import (
    DTYPES,
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
    message_of,
    unpack_dispatch,
)

log = logging.getLogger(__name__)

_RETRY_S = 0.1


class ExpertServer:
    """Serves one seat from :meth:`start` until :meth:`drain` or :meth:`close`.

    Args:
        compute: called in one thread alone, under inference mode.
        experts: layer -> ids of the experts held here; a call for others fails.
        hello: what this worker is; rows and bytes are filled in here.
        secret: shared by all workers of the cluster.
        inbox_rows: rows accepted and not yet answered, over all connections.
        join_rows: most rows that one computation takes of several calls.
        max_bytes: largest payload accepted.
        tls: a server's context, if connections are to be encrypted.
        lanes: offered to attention workers, unless connections are encrypted: a lane is not.
        weights: layer -> ids of the experts held here and their tensors, for workers that join; none are given away.
        symm: serves attention workers of this node by shared memory.
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
        tls: ssl.SSLContext | None = None,
        lanes: Lanes | None = None,
        weights: Mapping[int, tuple[tuple[int, ...], LayerTensors]] | None = None,
        symm: SymmHost | None = None,
    ) -> None:
        check_facts(hello, secret)
        self._hello = msgspec.structs.replace(hello, max_rows=inbox_rows, max_bytes=max_bytes)
        self._weights = weights or {}
        self._lanes = lanes if tls is None else None
        if self._lanes is not None:
            self._hello = self._lanes.offered(self._hello)
        self._experts = {layer: frozenset(ids) for layer, ids in experts.items()}
        self._secret = secret
        self._timing = timing or Timing()
        self._tls = tls
        self._symm = symm
        self._limits = Limits(header=HEADER_BYTES, payload=max_bytes)
        self._max_connections = max_connections
        self._inbox = Inbox(inbox_rows, join_rows)
        self._loop = ComputeLoop(compute, self._inbox)
        self._gate = threading.Lock()
        self._connections: dict[socket.socket, threading.Thread] = {}
        self._peers: set[Peer] = set()
        self._leaving = False
        self._closing = threading.Event()
        self.failure: BaseException | None = None
        """What ended one of its threads. It answers nobody any more: calls in flight go to replicas at once."""
        self._listener = listen(host, port)
        self._threads = [
            threading.Thread(target=self._guard, args=(self._accept,), name="experts accept", daemon=True),
            threading.Thread(target=self._guard, args=(self._loop.run,), name="experts compute", daemon=True),
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    @property
    def address(self) -> tuple[str, int]:
        host, port = self._listener.getsockname()[:2]
        return host, port

    @property
    def counts(self) -> Counts:
        return self._loop.counts

    @property
    def rows_in_flight(self) -> int:
        return self._inbox.rows_in_flight

    @property
    def waited_s(self) -> float:
        """As :attr:`services.fabric.tcp_inbox.Inbox.waited_s`."""
        return self._inbox.waited_s

    def drain(self, seconds: float) -> bool:
        """Refuse new calls, finish those that are here, close. Whether all were answered within ``seconds``."""
        with self._gate:
            self._leaving = True
            peers = list(self._peers)
        shut_socket(self._listener)
        for peer in peers:
            peer.send(Kind.LEAVING)
        finished = self._inbox.wait_idle(seconds) and (self._symm is None or self._symm.wait_idle(seconds))
        for peer in peers:
            peer.finish()
        self.close()
        return finished

    def close(self) -> None:
        """End every connection and thread; calls in flight get no answer."""
        for thread in [*self._threads, *self._end_connections()]:
            if thread.ident is not None:
                thread.join(self._timing.handshake_s)
        self._listener.close()
        if self._symm is not None:
            self._symm.close()

    def _end_connections(self) -> list[threading.Thread]:
        """Returns the threads that end by this."""
        with self._gate:
            self._leaving = True
            connections, peers = dict(self._connections), list(self._peers)
        shut_socket(self._listener)
        self._closing.set()
        self._inbox.close()
        for peer in peers:
            peer.shut()
        for sock in connections:
            shut_socket(sock)
        return list(connections.values())

    def _guard(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:  # the thread's boundary: whoever owns the server looks at it
            self.failure = error
            log.critical("Seat %d serves no more.", self._hello.seat, exc_info=error)
            self._end_connections()

    def _accept(self) -> None:
        while True:
            try:
                sock, address = self._listener.accept()
            except OSError as error:
                if self._leaving:
                    return
                log.warning("Accepting a connection failed: %s", error)
                self._closing.wait(_RETRY_S)  # no file descriptors left, say
                continue
            with self._gate:
                if self._leaving or len(self._connections) >= self._max_connections:
                    sock.close()
                    continue
                name = f"attention worker at {address[0]}:{address[1]}"
                thread = threading.Thread(target=self._serve, args=(sock, name), name=name, daemon=True)
                self._connections[sock] = thread
            thread.start()

    def _serve(self, sock: socket.socket, name: str) -> None:
        try:
            self._converse(sock, name)
        except SeatLost as error:
            log.info("%s", error)
        except (ExpertMeshError, OSError) as error:
            log.warning("Connection of %s ended: %s", name, error)
        finally:
            sock.close()
            with self._gate:
                del self._connections[sock]

    def _converse(self, sock: socket.socket, name: str) -> None:
        until = soon(self._timing.handshake_s)
        if self._tls is not None:
            sock.settimeout(self._timing.handshake_s)
            sock = self._tls.wrap_socket(sock, server_side=True)
        stream = Stream(sock, silence_s=self._timing.silence_s, name=name)
        try:
            theirs = admit(stream, self._secret, self._hello, until, leaving=self._leaving)
            lanes = self._lanes if self._lanes is not None and self._lanes.agreed(theirs, name) else None
        except ExpertMeshError:
            stream.close()
            raise
        peer = Peer(stream, self._limits, alive_s=self._timing.alive_s, patient=False)
        try:
            self._follow(peer, lanes)
        finally:
            with self._gate:
                self._peers.discard(peer)
            if self._symm is not None:
                self._symm.lost(peer)
            peer.close()

    def _follow(self, peer: Peer, lanes: Lanes | None) -> None:
        opening: Opening | None = None
        with self._gate:
            self._peers.add(peer)
            leaving = self._leaving
        if leaving:
            peer.send(Kind.LEAVING)
        try:
            while True:
                opening = self._take(peer, peer.receive(), lanes, opening)
        finally:
            if opening is not None:
                opening.cancel()

    def _take(self, peer: Peer, frame: Frame, lanes: Lanes | None, opening: Opening | None) -> Opening | None:
        if frame.kind == Kind.DISPATCH:
            self._dispatch(peer, frame)
        elif frame.kind == Kind.ECHO:
            peer.send(Kind.ECHO, message_of(frame, Echo), [frame.payload])
        elif frame.kind == Kind.FETCH:
            give(peer, frame, self._weights)
        elif frame.kind == Kind.LANE and lanes is not None:
            opening = opening or lanes.welcome(peer)
            opening.take(frame)
        elif frame.kind == Kind.REFUSED:
            raise refusal(message_of(frame, Refused), peer.name)
        elif self._symm is not None and self._symm.take(peer, frame):
            pass
        elif frame.kind != Kind.ALIVE:
            raise WireError(f"{peer.name} sent {frame.kind.name}, which no expert worker takes.")
        return opening

    def _dispatch(self, peer: Peer, frame: Frame) -> None:
        facts = message_of(frame, Dispatch)
        hidden, dtype = self._hello.hidden, DTYPES[self._hello.dtype]
        came_RD = peer.receive_rows(facts.rows, hidden, dtype)
        x_RD, ids_RK, weights_RK = unpack_dispatch(frame, facts, hidden, dtype, came_RD)
        if self._leaving:
            _fail(peer, facts.call, SeatLeaving(f"Seat {self._hello.seat} is leaving.", hint="Use another replica."))
            return
        if strangers := set(ids_RK.flatten().tolist()) - {-1} - self._experts.get(facts.layer, frozenset()):
            problem = f"Seat {self._hello.seat} does not hold experts {sorted(strangers)[:8]} of layer {facts.layer}."
            _fail(peer, facts.call, CallFailed(problem, hint="Is the routing table older than the worker?"))
            return
        call = Call(
            layer=facts.layer,
            reduced=facts.reduced,
            x_RD=x_RD,
            ids_RK=ids_RK,
            weights_RK=weights_RK,
            answer=lambda result: self._answer(peer, facts, call, result),
        )
        self._inbox.put(call)

    def _answer(self, peer: Peer, facts: Dispatch, call: Call, result: Tensor | Exception) -> None:
        release = partial(self._inbox.release, call)
        if isinstance(result, Exception):
            problem = f"Seat {self._hello.seat} failed in layer {facts.layer}: {type(result).__name__}: {result}"
            _fail(peer, facts.call, CallFailed(problem[:1000]))
            release()
            return
        answer = Answer(call=facts.call, rows=len(result), dtype=NAMES[result.dtype])
        peer.send(Kind.ANSWER, answer, rows=result, on_sent=release)


def _fail(peer: Peer, call: int, error: FabricError) -> None:
    peer.send(Kind.FAILED, Failed(call=call, code=error.code, message=error.message))
