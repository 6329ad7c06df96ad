"""Makes a proven connection to an address: TCP, TLS if configured, handshake, echo."""

from __future__ import annotations

import os
import socket
import zlib
from dataclasses import dataclass, field

import torch

from services.errors import SeatLeaving, SeatLost, WireError
from services.fabric.byte_counts import ByteCounts
from services.fabric.faults import Faults
from services.fabric.tcp.extension import Transports
from services.fabric.tcp.frames import ECHO_BYTES, HEADER_BYTES, MAX_BYTES, Echo, Kind, Limits, bytes_of, message_of
from services.fabric.tcp.handshake import Hello, greet
from services.fabric.tcp.peer import Peer, Timing, deadline_in
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.tls import ClientTls
from services.fabric.tcp.versions import SPOKEN, Versions
from services.routing import Seat


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """The facts by which a worker connects to any seat: its own ones, the cluster's secret, and how to connect.

    ``max_bytes`` is the largest payload of a frame that it accepts. ``lanes`` are offered to seats.
    """

    hello: Hello
    secret: bytes
    timing: Timing = field(default_factory=Timing)
    max_bytes: int = MAX_BYTES
    tls: ClientTls | None = None
    lanes: Transports | None = None
    spoken: Versions = SPOKEN
    faults: Faults = field(default_factory=Faults)
    byte_counts: ByteCounts = field(default_factory=ByteCounts)


def seat_name(seat: Seat) -> str:
    """Return the name of ``seat`` for logs and errors."""
    return f"{seat.name} (seat {seat.number} at {seat.host}:{seat.port})"


def connect(seat: Seat, facts: Facts) -> tuple[Peer, Hello]:
    """Return an authenticated connection, and what the worker there says of itself.

    Raises:
        OSError: nobody listens at the address, or TLS fails.
        SeatLost: another worker or seat is at the address.
        ExpertMeshError: see :func:`services.fabric.tcp.handshake.greet`.
    """
    until = deadline_in(facts.timing.handshake_s)
    sock = socket.create_connection((seat.host, seat.port), facts.timing.handshake_s)
    if facts.tls is not None:
        sock = facts.tls.wrap(sock, seat.host)
    stream = Stream(sock, silence_s=facts.timing.silence_s, name=seat_name(seat))
    try:
        hello = facts.hello if facts.lanes is None else facts.lanes.offered(facts.hello)
        agreed = greet(stream, facts.secret, hello, until, spoken=facts.spoken)
        theirs = agreed.theirs
        if (theirs.seat, theirs.worker) != (seat.number, seat.worker):
            raise SeatLost(f"{stream.name} has become seat {theirs.seat} of worker {theirs.worker!r}.")
    except BaseException:
        stream.close()
        raise
    limits = Limits(header=HEADER_BYTES, payload=max(facts.max_bytes, ECHO_BYTES))
    alive_s, byte_counts = facts.timing.alive_s, facts.byte_counts
    peer = Peer(stream, limits, alive_s=alive_s, may_pause=True, version=agreed.version, byte_counts=byte_counts)
    return peer, theirs


def prove(peer: Peer, seconds: float) -> None:
    """Send random bytes to the expert worker and check what comes back.

    Raises:
        WireError: other bytes came back.
        SeatLeaving: the worker is draining.
        SeatLost: nothing came back within ``seconds``.
    """
    until = deadline_in(seconds)
    sent = torch.frombuffer(bytearray(os.urandom(ECHO_BYTES)), dtype=torch.uint8)
    crc = zlib.crc32(bytes_of(sent))
    peer.send(Kind.ECHO, Echo(crc=crc), [sent])
    while (frame := peer.receive(until)).kind != Kind.ECHO:
        if frame.kind == Kind.LEAVING:
            raise SeatLeaving(f"{peer.name} is leaving.", hint="The routing table will follow.")
    if message_of(frame, Echo).crc != crc or zlib.crc32(bytes_of(frame.payload)) != crc:
        raise WireError(f"{peer.name} sent back bytes that it was not sent.", hint="Is the network damaging data?")
