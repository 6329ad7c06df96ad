"""Two sides speak the highest version that both know, or part by name; nobody between can lower it, nobody deceives."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial

import msgspec
import pytest
from testkit.fabric.tcp import SECRET, Serve, doubles, hello, linked, pair, seat_of, table_at, table_of
from testkit.waiting import until

from services.errors import (
    ConfigError,
    ExpertMeshError,
    FabricError,
    FingerprintMismatch,
    ProtocolMismatch,
    SecretMismatch,
)
from services.fabric.tcp import handshake as tcp_handshake
from services.fabric.tcp.frames import FIXED, MAGIC, Kind, frame_parts, message_of, read_frame
from services.fabric.tcp.handshake import HANDSHAKE_LIMITS, Agreed, Hello, Nonce, Proof, Refused
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.versions import HANDSHAKE, SPOKEN, Versions


def outcome(stream: Stream, work: Callable[[], Agreed]) -> Agreed | ExpertMeshError:
    try:
        return work()
    except ExpertMeshError as error:
        stream.shut()  # so that the other side does not wait for this one to read why
        return error


def shake(
    mine: Hello,
    theirs: Hello,
    *,
    secret: bytes = SECRET,
    attention: Versions = SPOKEN,
    experts: Versions = SPOKEN,
    ends: tuple[Stream, Stream] | None = None,
) -> list[Agreed | ExpertMeshError]:
    """What a handshake is for the attention side, which knows ``secret``, and for the expert side."""
    until = time.monotonic() + 20
    with nullcontext(ends) if ends else pair() as (near, far), ThreadPoolExecutor(2) as pool:
        greet = partial(tcp_handshake.greet, near, secret, mine, until, spoken=attention)
        admit = partial(tcp_handshake.admit, far, SECRET, theirs, until, spoken=experts)
        return list(pool.map(outcome, (near, far), (greet, admit)))


@pytest.mark.parametrize(
    ("secret", "theirs", "error"),
    [
        (b"guess", hello(seat=0), SecretMismatch),
        (SECRET, hello(seat=0, fingerprint="another"), FingerprintMismatch),
        (SECRET, hello(seat=0, weights="tuned"), FingerprintMismatch),
        (SECRET, hello(8, seat=0), ProtocolMismatch),
        (SECRET, hello(4, "bfloat16", seat=0), ProtocolMismatch),
        (SECRET, hello(seat=0, batch_invariant=True), ProtocolMismatch),
    ],
)
def test_both_sides_say_why_they_part(secret: bytes, theirs: Hello, error: type[Exception]) -> None:
    assert [type(found) for found in shake(hello(weights="base"), theirs, secret=secret)] == [error, error]


@pytest.mark.parametrize("mine", [True, False])
def test_who_computes_batch_invariantly_is_named(mine: bool) -> None:
    sides = hello(batch_invariant=mine), hello(seat=0, batch_invariant=not mine)
    one, other = ("attention-0", "experts-0") if mine else ("experts-0", "attention-0")
    words = f"worker '{one}' computes batch-invariantly, and worker '{other}' does not"
    with pytest.raises(ProtocolMismatch, match=words):
        tcp_handshake._check_model(*sides, "experts-0")


@pytest.mark.parametrize(("mine", "theirs"), [("base", ""), ("", "base"), ("base", "base")])
def test_weights_that_one_side_does_not_know_part_nobody(mine: str, theirs: str) -> None:
    """The release before sends no hash of its weights."""
    tcp_handshake._check_model(hello(weights=mine), hello(seat=0, weights=theirs), "experts-0")


@pytest.mark.parametrize("theirs", ["base", "base+int8-channel", ""])
def test_who_holds_experts_in_another_form_is_refused_by_both_names(theirs: str) -> None:
    """A worker of the release before, which knows no form and maybe no weights, holds dense ones."""
    sides = hello(weights="base+int4-g128"), hello(seat=0, weights=theirs)
    found = "int8-channel" if "+" in theirs else "dense"
    words = f"is for experts held in {found}, this worker .'attention-0'. for experts held in int4-g128"
    with pytest.raises(FingerprintMismatch, match=words):
        tcp_handshake._check_model(*sides, "experts-0")
    with pytest.raises(FingerprintMismatch, match=f"held in int4-g128, this worker .* for experts held in {found}"):
        tcp_handshake._check_model(*reversed(sides), "attention-0")


def test_who_holds_other_linear_layers_in_another_form_is_refused_so() -> None:
    sides = hello(weights="base+int8-channel+fp8-128x128"), hello(seat=0, weights="base+int8-channel")
    words = (
        r"held in int8-channel, this worker .* for experts held in int8-channel and other linear layers in fp8-128x128"
    )
    with pytest.raises(FingerprintMismatch, match=words) as refused:
        tcp_handshake._check_model(*sides, "experts-0")
    assert "--dense-format" in str(refused.value)


def test_an_expert_worker_without_the_secret_is_not_believed() -> None:
    """It accepts any proof and welcomes with one that it cannot make."""

    def impostor(far: Stream) -> str:
        until = time.monotonic() + 10
        read_frame(far, HANDSHAKE_LIMITS, until)
        far.send(frame_parts(Kind.CHALLENGE, Nonce(nonce=b"n" * 32)))
        read_frame(far, HANDSHAKE_LIMITS, until)
        signed = msgspec.msgpack.encode(hello(seat=0))
        far.send(frame_parts(Kind.WELCOME, Proof(hello=signed, proof=b"p" * 32)))
        frame = read_frame(far, HANDSHAKE_LIMITS, until)
        far.shut()
        return message_of(frame, Refused).code

    with pair() as (near, far), ThreadPoolExecutor(1) as pool:
        answering = pool.submit(impostor, far)
        with pytest.raises(SecretMismatch):
            tcp_handshake.greet(near, SECRET, hello(), time.monotonic() + 10)
        assert answering.result(20) == "secret_mismatch"


def test_an_empty_secret_is_refused(served: Serve) -> None:
    with pytest.raises(ConfigError, match="secret"):
        served(secret=b"")


@pytest.mark.parametrize(
    ("attention", "experts", "version"),
    [((1, 1), (1, 1), 1), ((1, 2), (1, 1), 1), ((1, 3), (2, 5), 3), ((2, 5), (1, 3), 3), ((4, 4), (1, 9), 4)],
)
def test_both_sides_agree_on_the_highest_version_that_both_speak(
    attention: tuple[int, int], experts: tuple[int, int], version: int
) -> None:
    for agreed in shake(hello(), hello(seat=0), attention=Versions(*attention), experts=Versions(*experts)):
        assert isinstance(agreed, Agreed)
        assert agreed.version == version


@pytest.mark.parametrize(("attention", "experts"), [((1, 1), (2, 3)), ((4, 6), (2, 3)), ((3, 2), (1, 9))])
def test_without_a_version_in_common_both_sides_say_what_each_speaks(
    attention: tuple[int, int], experts: tuple[int, int]
) -> None:
    spoken = Versions(*attention), Versions(*experts)
    for error in shake(hello(), hello(seat=0), attention=spoken[0], experts=spoken[1]):
        assert isinstance(error, ProtocolMismatch)
        assert all(str(versions) in error.message for versions in spoken)
        assert error.message.count("(release 0)") == 2


def test_rows_go_in_frames_of_the_version_agreed_on(served: Serve) -> None:
    server = served(spoken=Versions(1, 3))
    with linked(table_at(server), spoken=Versions(2, 7)) as link:
        assert doubles(link)
        (peer,) = server._peers
        (seat,) = link._seats.links.values()
        assert seat._connection is not None
        for end in (peer, seat._connection.peer):
            outgoing = frame_parts(Kind.ALIVE, version=end._version)
            assert FIXED.unpack(outgoing[0])[1] == 3
        assert (server.faults.totals(), link.faults()) == ({}, {})


def test_a_frame_of_another_version_ends_its_connection_alone(served: Serve) -> None:
    server = served(spoken=Versions(1, 3))
    with linked(table_at(server), spoken=Versions(1, 3)) as link:
        (seat,) = link._seats.links.values()
        assert seat._connection is not None
        seat._connection.peer._version = 2
        until(lambda: server.faults.totals() == {"protocol_mismatch": 1}, "it was noticed")
        until(lambda: len(link.usable()) == 1, "and connected again")
        assert doubles(link)
        assert seat.connections == 2


def test_a_seat_that_is_refused_is_counted_and_used_once_it_speaks(served: Serve) -> None:
    old, speaks = served(spoken=Versions(1, 1)), Versions(2, 2)
    seat = seat_of(old, 0)
    with linked(table_of(seat), spoken=speaks, ready=False) as link:
        until(lambda: link.faults().get("protocol_mismatch", 0) >= 2, "it is tried again")
        until(lambda: old.faults.totals().get("protocol_mismatch", 0) >= 2, "and counted there, too")
        assert old.failure is None
        old.close()
        served(spoken=speaks, port=seat.port, seat=0)
        until(lambda: len(link.usable()) == 1, "the seat was upgraded")
        assert doubles(link)


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
            facts = tcp_handshake._speaking(msgspec.msgpack.decode(proof.hello, type=Hello), LOW)
            header = msgspec.msgpack.encode(msgspec.structs.replace(proof, hello=msgspec.msgpack.encode(facts)))
        sink.send([memoryview(FIXED.pack(b"EMXF", 1, frame.kind, len(header), 0)), memoryview(header)])

    with pair() as (attention, left), pair() as (right, experts):
        for way in ((left, right), (right, left)):
            threading.Thread(target=pass_on, args=way, daemon=True).start()
        ends = shake(hello(), hello(seat=0), attention=speaks, experts=speaks, ends=(attention, experts))
    assert isinstance(ends[1] if lowered == Kind.PROOF else ends[0], SecretMismatch)


LOW = Versions(1, 1)


def test_a_hello_of_another_handshake_is_refused_by_name() -> None:
    until = time.monotonic() + 10
    with pair() as (near, far), ThreadPoolExecutor(1) as pool:
        admitting = pool.submit(tcp_handshake.admit, far, SECRET, hello(seat=0), until)
        near.send([memoryview(FIXED.pack(MAGIC, HANDSHAKE + 1, Kind.HELLO, 0, 0))])
        with pytest.raises(ProtocolMismatch, match="refused"):
            tcp_handshake._read(near, Kind.CHALLENGE, Nonce, until)
        near.shut()
        assert type(admitting.exception(20)) is ProtocolMismatch
