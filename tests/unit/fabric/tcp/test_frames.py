"""Bytes of unknown clients: whatever arrives, the server lives, answers others and allocates no more than it allows."""

from __future__ import annotations

import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
import torch
from testkit.fabric.tcp import SECRET, Serve, doubles, ended, hello, linked, pair, serve, table_at

from services.errors import ProtocolMismatch, SeatLost, WireError
from services.fabric.tcp import handshake as tcp_handshake
from services.fabric.tcp.frames import (
    FIXED,
    MAGIC,
    Dispatch,
    Frame,
    Kind,
    Limits,
    frame_parts,
    read_frame,
    unpack_dispatch,
)
from services.fabric.tcp.peer import Timing
from services.fabric.tcp.server import ExpertServer
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.versions import HANDSHAKE


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertServer]:
    running = serve(timing=Timing(handshake_s=1.5, alive_s=0.1, silence_s=1.5))
    yield running
    running.close()


def talk(server: ExpertServer) -> Stream:
    return Stream(socket.create_connection(server.address), silence_s=20, name="server")


def admitted(server: ExpertServer) -> Stream:
    stream = talk(server)
    tcp_handshake.greet(stream, SECRET, hello(), time.monotonic() + 10)
    return stream


@pytest.mark.parametrize(
    ("fixed", "error"),
    [
        ((b"HTTP", HANDSHAKE, Kind.ECHO, 0, 0), WireError),
        ((MAGIC, HANDSHAKE + 1, Kind.ECHO, 0, 0), ProtocolMismatch),
        ((MAGIC, HANDSHAKE, 99, 0, 0), WireError),
        ((MAGIC, HANDSHAKE, Kind.ECHO, 101, 0), WireError),
        ((MAGIC, HANDSHAKE, Kind.ECHO, 0, 2**63), WireError),
    ],
)
def test_what_is_no_frame_is_refused_before_it_is_read(fixed: tuple[bytes, int, int, int, int], error: type) -> None:
    with pair() as (near, far):
        near.send([memoryview(FIXED.pack(*fixed))])
        tracemalloc.start()
        with pytest.raises(error):
            read_frame(far, Limits(100, 100))
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
        tracemalloc.stop()


def test_a_frame_that_stops_half_way_ends_in_time() -> None:
    with pair() as (near, far):
        near.send([memoryview(FIXED.pack(MAGIC, HANDSHAKE, Kind.ECHO, 0, 50))])
        with pytest.raises(SeatLost, match="silent"):
            read_frame(far, Limits(100, 100), until=time.monotonic() + 0.1)


@pytest.mark.parametrize(("rows", "slots"), [(-1, 1), (1, 0), (2**40, 1), (1, 2**40), (3, 1)])
def test_a_call_that_does_not_fit_its_payload_ends_the_connection(server: ExpertServer, rows: int, slots: int) -> None:
    stream = admitted(server)
    call = Dispatch(call=1, epoch=0, step=0, layer=0, micro_batch=0, rows=rows, slots=slots, reduced=False)
    payload = torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(WireError):
        unpack_dispatch(Frame(Kind.DISPATCH, b"", payload), call, 4, torch.float32)
    stream.send(frame_parts(Kind.DISPATCH, call, [payload]))
    assert ended(stream)


def test_an_unknown_client_cannot_hold_more_than_a_handshake(server: ExpertServer) -> None:
    stream = talk(server)
    stream.send([memoryview(FIXED.pack(MAGIC, HANDSHAKE, Kind.DISPATCH, 10, 1 << 20))])
    with pytest.raises(WireError, match="at most 4096"):
        tcp_handshake.greet(stream, SECRET, hello(), time.monotonic() + 10)
    stream.close()


@pytest.mark.parametrize("connect", [talk, admitted])
def test_who_falls_silent_is_dropped(server: ExpertServer, connect: Callable[[ExpertServer], Stream]) -> None:
    """Before it has proven itself, by the deadline of the handshake."""
    assert ended(connect(server))


def test_a_server_listens_on_ipv6(served: Serve) -> None:
    server = served(host="::1")
    assert server.address[0] == "::1"
    with linked(table_at(server)) as link:
        assert doubles(link)
