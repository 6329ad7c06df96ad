"""Two sides speak the highest version that both know, or part by name; nobody between them can lower it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import pytest
import torch
from testkit.fabric.tcp import SECRET, hello, linked, pair, seat_of, send, serve, table_of
from testkit.waiting import until

from services.errors import ExpertMeshError, FabricError, ProtocolMismatch, SecretMismatch
from services.fabric.tcp import handshake as tcp_handshake
from services.fabric.tcp.frames import FIXED, Kind, frame_parts, message_of, read_frame
from services.fabric.tcp.handshake import HANDSHAKE_LIMITS, Agreed, Proof
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.versions import Versions

ONES = torch.ones(3, 4)


def outcome(work: Callable[[], Agreed]) -> Agreed | ExpertMeshError:
    try:
        return work()
    except ExpertMeshError as error:
        return error


def shake(attention: Versions, experts: Versions) -> tuple[Agreed | ExpertMeshError, Agreed | ExpertMeshError]:
    """What a handshake between them is for either side."""
    until = time.monotonic() + 20
    with pair() as (near, far), ThreadPoolExecutor(2) as pool:
        greeting = pool.submit(outcome, lambda: tcp_handshake.greet(near, SECRET, hello(), until, spoken=attention))
        admitting = pool.submit(outcome, lambda: tcp_handshake.admit(far, SECRET, hello(seat=0), until, spoken=experts))
        return greeting.result(), admitting.result()


@pytest.mark.parametrize(
    ("attention", "experts", "version"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((4, 4), (1, 9), 4)],
)
def test_both_sides_agree_on_the_highest_version_that_both_speak(
    attention: tuple[int, int], experts: tuple[int, int], version: int
) -> None:
    for agreed in shake(Versions(*attention), Versions(*experts)):
        assert isinstance(agreed, Agreed)
        assert agreed.version == version


@pytest.mark.parametrize(("attention", "experts"), [((1, 1), (2, 3)), ((4, 6), (2, 3)), ((3, 2), (1, 9))])
def test_without_a_version_in_common_both_sides_say_what_each_speaks(
    attention: tuple[int, int], experts: tuple[int, int]
) -> None:
    for error in shake(Versions(*attention), Versions(*experts)):
        assert isinstance(error, ProtocolMismatch)
        for versions in (Versions(*attention), Versions(*experts)):
            assert str(versions) in error.message
        assert error.message.count("(release 0)") == 2


def test_rows_go_in_frames_of_the_version_agreed_on() -> None:
    server = serve(spoken=Versions(1, 3))
    try:
        with linked(table_of(seat_of(server, 0)), spoken=Versions(2, 7)) as link:
            assert torch.equal(send(link, ONES), 2 * ONES)
            (peer,) = server._peers
            (seat,) = link._seats.links.values()
            assert seat._connection is not None
            for end in (peer, seat._connection.peer):
                outgoing = frame_parts(Kind.ALIVE, version=end._version)
                assert FIXED.unpack(outgoing[0])[1] == 3
            assert (server.faults.totals(), link.faults()) == ({}, {})
    finally:
        server.close()


def test_a_frame_of_another_version_ends_its_connection_alone() -> None:
    server = serve(spoken=Versions(1, 3))
    try:
        with linked(table_of(seat_of(server, 0)), spoken=Versions(1, 3)) as link:
            (seat,) = link._seats.links.values()
            assert seat._connection is not None
            seat._connection.peer._version = 2
            until(lambda: server.faults.totals() == {"protocol_mismatch": 1}, "it was noticed")
            until(lambda: len(link.usable()) == 1, "and connected again")
            assert torch.equal(send(link, ONES), 2 * ONES)
            assert seat.connections == 2
    finally:
        server.close()


def test_a_seat_that_is_refused_is_counted_and_used_once_it_speaks() -> None:
    old, speaks = serve(spoken=Versions(1, 1)), Versions(2, 2)
    seat = seat_of(old, 0)
    try:
        with linked(table_of(seat), spoken=speaks, ready=False) as link:
            until(lambda: link.faults().get("protocol_mismatch", 0) >= 2, "it is tried again")
            until(lambda: old.faults.totals().get("protocol_mismatch", 0) >= 2, "and counted there, too")
            assert old.failure is None
            old.close()
            upgraded = serve(spoken=speaks, port=seat.port)
            try:
                until(lambda: len(link.usable()) == 1, "the seat was upgraded")
                assert torch.equal(send(link, ONES), 2 * ONES)
            finally:
                upgraded.close()
    finally:
        old.close()


@pytest.mark.parametrize("lowered", [Kind.PROOF, Kind.WELCOME])
def test_who_sits_between_cannot_lower_the_version(lowered: Kind) -> None:
    """It passes frames on, and changes the facts of one side."""
    speaks, until = Versions(1, 3), time.monotonic() + 20

    def pass_on(source: Stream, sink: Stream) -> None:
        with suppress(FabricError):
            while True:
                pass_one_on(source, sink)

    def pass_one_on(source: Stream, sink: Stream) -> None:
        frame = read_frame(source, HANDSHAKE_LIMITS, until)
        header = frame.header
        if frame.kind == lowered:
            proof = message_of(frame, Proof)
            facts = tcp_handshake._speaking(msgspec.msgpack.decode(proof.hello, type=tcp_handshake.Hello), LOW)
            header = msgspec.msgpack.encode(msgspec.structs.replace(proof, hello=msgspec.msgpack.encode(facts)))
        sink.send([memoryview(FIXED.pack(b"EMXF", 1, frame.kind, len(header), 0)), memoryview(header)])

    with pair() as (attention, left), pair() as (right, experts), ThreadPoolExecutor(4) as pool:
        for way in ((left, right), (right, left)):
            threading.Thread(target=pass_on, args=way, daemon=True).start()
        greeting = pool.submit(outcome, lambda: tcp_handshake.greet(attention, SECRET, hello(), until, spoken=speaks))
        admitting = pool.submit(
            outcome, lambda: tcp_handshake.admit(experts, SECRET, hello(seat=0), until, spoken=speaks)
        )
        ends = [greeting.result(), admitting.result()]
    deceived = ends[1] if lowered == Kind.PROOF else ends[0]
    assert isinstance(deceived, SecretMismatch)


LOW = Versions(1, 1)
