"""Bytes of unknown clients: whatever arrives, the server lives, answers others and allocates no more than it allows."""

from __future__ import annotations

import socket
import struct
import subprocess
import time
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from testkit.fabric.tcp import CALM, SECRET, double, hello, linked, pair, seat_of, send, serve, table_of

from services.errors import (
    ConfigError,
    FingerprintMismatch,
    ProtocolMismatch,
    SeatLost,
    SecretMismatch,
    WireError,
)
from services.fabric.tcp import frames as tcp_wire
from services.fabric.tcp import handshake as tcp_handshake
from services.fabric.tcp.frames import FIXED, MAGIC, Dispatch, Kind, Limits, frame_parts, read_frame
from services.fabric.tcp.peer import Timing
from services.fabric.tcp.server import ExpertServer
from services.fabric.tcp.stream import Stream
from services.fabric.tcp.tls import ClientTls, server_tls
from services.fabric.tcp.versions import HANDSHAKE


@pytest.fixture(scope="module")
def server() -> Iterator[ExpertServer]:
    running = serve(timing=Timing(handshake_s=1.5, alive_s=0.1, silence_s=1.5))
    yield running
    running.close()


def talk(server: ExpertServer) -> Stream:
    return Stream(socket.create_connection(server.address), silence_s=20, name="server")


def ended(stream: Stream) -> bool:
    """Whether the other side closes within the time that the stream waits. Takes away what it says before."""
    try:
        while True:
            stream.recv_into(memoryview(bytearray(1)))
    except SeatLost as error:
        return "silent" not in error.message
    finally:
        stream.close()


def admitted(server: ExpertServer) -> Stream:
    stream = talk(server)
    tcp_handshake.greet(stream, SECRET, hello(), time.monotonic() + 10)
    return stream


def serves(server: ExpertServer) -> bool:
    with linked(table_of(seat_of(server, 0))) as link:
        x_TD = torch.ones(2, 4)
        return torch.equal(send(link, x_TD), 2 * x_TD)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduced", [False, True])
def test_a_dispatch_arrives_as_it_was_sent(dtype: torch.dtype, reduced: bool) -> None:
    x_RD, ids_RK = torch.randn(3, 5).to(dtype), torch.tensor([[1, -1], [0, 2], [-1, 7]], dtype=torch.int32)
    weights_RK = torch.rand(3, 2)
    tensors = [ids_RK, weights_RK, x_RD] if reduced else [ids_RK, x_RD]
    call = Dispatch(call=1, epoch=2, step=3, layer=4, micro_batch=5, rows=3, slots=2, reduced=reduced)
    with pair() as (near, far):
        near.send(frame_parts(Kind.DISPATCH, call, tensors))
        frame = read_frame(far, Limits(1000, 1000))
    assert tcp_wire.message_of(frame, Dispatch) == call
    got_x, got_ids, got_weights = tcp_wire.unpack_dispatch(frame, call, 5, dtype)
    assert torch.equal(got_x, x_RD)
    assert torch.equal(got_ids, ids_RK)
    assert torch.equal(got_weights, weights_RK if reduced else torch.ones(3, 2))


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


@given(st.binary(min_size=1, max_size=200), st.booleans())
@settings(max_examples=40, deadline=None)
def test_random_bytes_never_block_or_crash_the_server(server: ExpertServer, noise: bytes, framed: bool) -> None:
    stream = talk(server)
    parts = [FIXED.pack(MAGIC, HANDSHAKE, Kind.HELLO, len(noise), 0)] if framed else []
    stream.send([memoryview(part) for part in [*parts, noise]])
    assert half_closed_ends(stream)


def half_closed_ends(stream: Stream) -> bool:
    stream._sock.shutdown(socket.SHUT_WR)
    return ended(stream)


@given(st.binary(max_size=100), st.binary(max_size=100), st.sampled_from(list(Kind)))
@settings(max_examples=40, deadline=None)
def test_random_frames_of_an_admitted_peer_end_only_its_connection(
    server: ExpertServer, header: bytes, payload: bytes, kind: Kind
) -> None:
    stream = admitted(server)
    fixed = FIXED.pack(MAGIC, HANDSHAKE, kind, len(header), len(payload))
    stream.send([memoryview(fixed), memoryview(header), memoryview(payload)])
    assert half_closed_ends(stream)


def test_the_server_serves_on_after_noise(server: ExpertServer) -> None:
    stream = talk(server)
    stream.send([memoryview(b"GET / HTTP/1.1\r\n\r\n" * 10)])
    assert ended(stream)
    assert serves(server)


@pytest.mark.parametrize(("rows", "slots"), [(-1, 1), (1, 0), (2**40, 1), (1, 2**40), (3, 1)])
def test_a_call_that_does_not_fit_its_payload_ends_the_connection(server: ExpertServer, rows: int, slots: int) -> None:
    stream = admitted(server)
    call = Dispatch(call=1, epoch=0, step=0, layer=0, micro_batch=0, rows=rows, slots=slots, reduced=False)
    payload = torch.zeros(20, dtype=torch.uint8)
    with pytest.raises(WireError):
        tcp_wire.unpack_dispatch(tcp_wire.Frame(Kind.DISPATCH, b"", payload), call, 4, torch.float32)
    stream.send(frame_parts(Kind.DISPATCH, call, [payload]))
    assert ended(stream)


def test_a_half_open_connection_is_closed_by_the_deadline_of_the_handshake(server: ExpertServer) -> None:
    assert ended(talk(server))


def test_an_admitted_peer_that_falls_silent_is_dropped(server: ExpertServer) -> None:
    assert ended(admitted(server))


def test_an_unknown_client_cannot_hold_more_than_a_handshake(server: ExpertServer) -> None:
    stream = talk(server)
    stream.send([memoryview(FIXED.pack(MAGIC, HANDSHAKE, Kind.DISPATCH, 10, 1 << 20))])
    with pytest.raises(WireError, match="at most 4096"):
        tcp_handshake.greet(stream, SECRET, hello(), time.monotonic() + 10)
    stream.close()


def refused(mine: tcp_handshake.Hello, mine_secret: bytes, theirs: tcp_handshake.Hello) -> tuple[Exception, Exception]:
    """What the attention side and the expert side raise."""
    with pair() as (near, far), ThreadPoolExecutor(1) as pool:
        admitting = pool.submit(tcp_handshake.admit, far, SECRET, theirs, time.monotonic() + 10)
        with pytest.raises(Exception) as caught:  # noqa: PT011
            tcp_handshake.greet(near, mine_secret, mine, time.monotonic() + 10)
        near.shut()
        error = admitting.exception(20)
    assert isinstance(error, Exception)
    return caught.value, error


@pytest.mark.parametrize(
    ("secret", "theirs", "error"),
    [
        (b"guess", hello(seat=0), SecretMismatch),
        (SECRET, hello(seat=0, fingerprint="another"), FingerprintMismatch),
        (SECRET, hello(seat=0, weights="tuned"), FingerprintMismatch),
        (SECRET, hello(8, seat=0), ProtocolMismatch),
        (SECRET, hello(4, "bfloat16", seat=0), ProtocolMismatch),
    ],
)
def test_both_sides_say_why_they_part(secret: bytes, theirs: tcp_handshake.Hello, error: type[Exception]) -> None:
    attention, experts = refused(hello(weights="base"), secret, theirs)
    assert type(attention) is error
    assert type(experts) is error


@pytest.mark.parametrize(("mine", "theirs"), [("base", ""), ("", "base"), ("base", "base")])
def test_weights_that_one_side_does_not_know_part_nobody(mine: str, theirs: str) -> None:
    """The release before sends no hash of its weights."""
    tcp_handshake._check_model(hello(weights=mine), hello(seat=0, weights=theirs), "experts-0")


def test_another_version_is_refused_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    real = tcp_handshake.frame_parts

    def older(kind: Kind, *rest: object) -> list[memoryview]:
        parts = real(kind, *rest)  # type: ignore[arg-type]
        if kind != Kind.HELLO:
            return parts
        changed = bytearray(parts[0])
        struct.pack_into("!H", changed, 4, HANDSHAKE + 1)
        return [memoryview(changed)]

    monkeypatch.setattr(tcp_handshake, "frame_parts", older)
    attention, experts = refused(hello(), SECRET, hello(seat=0))
    assert type(attention) is type(experts) is ProtocolMismatch


def test_an_expert_worker_without_the_secret_is_not_believed() -> None:
    """It accepts any proof and welcomes with one that it cannot make."""

    def impostor(far: Stream) -> str:
        until = time.monotonic() + 10
        tcp_handshake.read_frame(far, tcp_handshake.HANDSHAKE_LIMITS, until)
        far.send(frame_parts(Kind.CHALLENGE, tcp_handshake.Nonce(nonce=b"n" * 32)))
        read_frame(far, tcp_handshake.HANDSHAKE_LIMITS, until)
        signed = msgspec.msgpack.encode(hello(seat=0))
        far.send(frame_parts(Kind.WELCOME, tcp_handshake.Proof(hello=signed, proof=b"p" * 32)))
        frame = read_frame(far, tcp_handshake.HANDSHAKE_LIMITS, until)
        far.shut()
        return tcp_wire.message_of(frame, tcp_handshake.Refused).code

    with pair() as (near, far), ThreadPoolExecutor(1) as pool:
        answering = pool.submit(impostor, far)
        with pytest.raises(SecretMismatch):
            tcp_handshake.greet(near, SECRET, hello(), time.monotonic() + 10)
        assert answering.result(20) == "secret_mismatch"


def test_an_empty_secret_is_refused() -> None:
    with pytest.raises(ConfigError, match="secret"):
        serve(double, secret=b"")


def test_rows_travel_over_tls(tmp_path: Path) -> None:
    key, cert = f"{tmp_path}/key.pem", f"{tmp_path}/cert.pem"
    command = "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2 -subj /CN=localhost"
    names = ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", key, "-out", cert]
    subprocess.run([*command.split(), *names], check=True, capture_output=True)
    server = serve(tls=server_tls(Path(cert), Path(key)), timing=CALM)
    x_TD = torch.randn(2000, 4)
    try:
        with linked(table_of(seat_of(server, 0)), tls=ClientTls(Path(cert))) as link:
            handles = [link.dispatch(0, x_TD, torch.zeros(2000, 1).long(), torch.ones(2000, 1)) for _ in range(20)]
            assert all(torch.equal(link.combine(handle), 2 * x_TD) for handle in handles)
    finally:
        server.close()


def test_tls_files_that_do_not_fit_are_refused_by_name(tmp_path: Path) -> None:
    (file := tmp_path / "not-pem").write_text("not PEM")
    assert server_tls(None, None) is None
    for wrong in (lambda: server_tls(file, None), lambda: server_tls(None, file)):
        with pytest.raises(ConfigError, match="--fabric-tls-cert and --fabric-tls-key"):
            wrong()
    with pytest.raises(ConfigError, match="not-pem"):
        server_tls(file, file)
    with pytest.raises(ConfigError, match=r"--fabric-tls-ca .*nowhere"):
        ClientTls(tmp_path / "nowhere")


def test_a_server_listens_on_ipv6() -> None:
    server = serve(host="::1", timing=CALM)
    try:
        assert server.address[0] == "::1"
        with linked(table_of(seat_of(server, 0))) as link:
            assert torch.equal(send(link, torch.ones(3, 4)), 2 * torch.ones(3, 4))
    finally:
        server.close()
