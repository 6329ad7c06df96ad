"""From an address to a connection that has been proven: TCP, TLS if asked for, handshake, echo."""

from __future__ import annotations

import os
import socket
import zlib
from dataclasses import dataclass, field

import torch

from services.errors import SeatLeaving, SeatLost, WireError
from services.fabric.faults import Faults
from services.fabric.tcp.extension import Transports
from services.fabric.tcp.frames import ECHO_BYTES, HEADER_BYTES, Echo, Kind, Limits, bytes_of, message_of
from services.fabric.tcp.handshake import Hello, greet
from services.fabric.tcp.peer import Peer, Timing, deadline_in
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.tls import ClientTls
from services.fabric.tcp.versions import SPOKEN, Versions
from services.routing import Seat


@dataclass(frozen=True, kw_only=True, slots=True)
class Facts:
    """What an attention worker needs to connect to any seat. ``spoken``: versions of the protocol."""

    hello: Hello
    secret: bytes
    timing: Timing
    max_bytes: int
    tls: ClientTls | None = None
    lanes: Transports | None = None
    spoken: Versions = SPOKEN
    faults: Faults = field(default_factory=Faults)


def seat_name(seat: Seat) -> str:
    return f"seat {seat.number} ({seat.worker} at {seat.host}:{seat.port})"


def connect(seat: Seat, facts: Facts) -> tuple[Peer, Hello]:
    """An authenticated connection and what the worker there is.

    Raises:
        OSError: nobody listens there, or TLS fails.
        SeatLost: another worker or seat is at this address.
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
            raise SeatLost(f"{stream.name} is seat {theirs.seat} of worker {theirs.worker!r} by now.")
    except BaseException:
        stream.close()
        raise
    limits = Limits(header=HEADER_BYTES, payload=max(facts.max_bytes, ECHO_BYTES))
    return Peer(stream, limits, alive_s=facts.timing.alive_s, patient=True, version=agreed.version), theirs


def prove(peer: Peer, seconds: float) -> None:
    """Bytes go there and back, with their checksum.

    Raises:
        WireError: other bytes came back.
        SeatLeaving: the worker is draining.
        SeatLost: nothing came back in time.
    """
    until = deadline_in(seconds)
    sent = torch.frombuffer(bytearray(os.urandom(ECHO_BYTES)), dtype=torch.uint8)
    crc = zlib.crc32(bytes_of(sent))
    peer.send(Kind.ECHO, Echo(crc=crc), [sent])
    while (frame := peer.receive(until)).kind != Kind.ECHO:
        if frame.kind == Kind.LEAVING:
            raise SeatLeaving(f"{peer.name} is leaving.", hint="The routing table will follow.")
    if message_of(frame, Echo).crc != crc or zlib.crc32(bytes_of(frame.payload)) != crc:
        raise WireError(f"{peer.name} sent back other bytes than it got.", hint="Is the network damaging data?")
