"""Bytes of whoever means harm, before and after it has proven itself: one typed error, its own connection, no more.

To seats, to attention workers from a false seat, to the ranks' proxy, to both ends of shared memory.
"""

from __future__ import annotations

import logging
import queue
import socket
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import repeat

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from testkit.fabric.frames import (
    CALL,
    FRAME_OF,
    HANDLE,
    MESSAGES,
    NONCE,
    STEP,
    framed,
    mutated,
    nearly_frames,
    nearly_messages,
)
from testkit.fabric.shared_memory import serve_shared
from testkit.fabric.tcp import (
    ONES,
    SECRET,
    doubles,
    ended,
    hello,
    linked,
    scaled,
    seat_of,
    send,
    serve,
    table_at,
    table_of,
)
from testkit.processes.servers import free_port
from testkit.waiting import until

from services.errors import ExpertMeshError, FabricError, WireError
from services.fabric.faults import Faults
from services.fabric.lockstep.rendezvous import Facts
from services.fabric.lockstep.rendezvous import _facts_of as facts_of_rank
from services.fabric.lockstep.store_proxy import ClientProxy, ServerProxy
from services.fabric.shared_memory import messages as sharing
from services.fabric.shared_memory.host_memory import HostMemory
from services.fabric.shared_memory.memory import MemoryHandle, decode_handle
from services.fabric.tcp import connection as tcp_seat
from services.fabric.tcp import frames as tcp_wire
from services.fabric.tcp import handshake as tcp_handshake
from services.fabric.tcp.frames import Kind, Limits, frame_parts, read_frame
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.peer import Timing
from services.fabric.tcp.server import ExpertServer
from services.fabric.tcp.stream import Stream
from services.routing import Seat

GENEROUS = Timing(handshake_s=20.0, alive_s=0.5, silence_s=20.0)
FUZZ = settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.fixture(autouse=True, scope="module")
def _no_thread_dies() -> Iterator[None]:
    """By an error that nobody expected."""
    died, before = list[object](), threading.excepthook
    threading.excepthook = lambda args: died.append(args.exc_value)
    yield
    threading.excepthook = before
    assert died == []


@FUZZ
@given(st.sampled_from(MESSAGES).flatmap(lambda message: st.tuples(st.just(type(message)), nearly_messages(message))))
def test_what_cannot_be_decoded_is_one_kind_of_error(case: tuple[type[msgspec.Struct], bytes]) -> None:
    kind, data = case
    with suppress(WireError):
        assert isinstance(tcp_wire.decoded(data, kind, "something"), kind)


@pytest.mark.parametrize(
    "data",
    [b"\x91\xa1\xff", b"\xdc\x00\x20" + b"\x91" * 4000, b"\xdd\xff\xff\xff\xff", b"\x91\xdb\xff\xff\xff\xff", b""],
    ids=["no utf-8", "too deep", "an endless array", "an endless string", "nothing"],
)
def test_what_no_decoder_may_choke_on(data: bytes) -> None:
    for message in MESSAGES:
        if not isinstance(message, sharing.Stop):
            with pytest.raises(WireError):
                tcp_wire.decoded(data, type(message), "something")


# seats


@pytest.fixture(scope="module")
def seat() -> Iterator[ExpertServer]:
    """With everything that frames may be about."""
    weights = {0: ((0, 2), {"down": torch.ones(2, 3)})}
    running = serve_shared(scaled, lane="gloo", weights=weights, timing=GENEROUS, experts={0: range(8)})
    yield running
    running.close()


@pytest.fixture(scope="module")
def bystander(seat: ExpertServer) -> Iterator[TcpLink]:
    """An honest attention worker: whatever others send, its connection stays and it is answered."""
    with linked(table_at(seat), timing=GENEROUS) as link:
        yield link
        assert torch.equal(send(link, ONES), ONES)
        assert seat.failure is None
        assert [one.connections for one in link._seats.links.values()] == [1]


def sent(seat: ExpertServer, data: bytes, *, proven: bool) -> None:
    """Sends ``data``, and waits for the other side to be done with it and close."""
    stream = Stream(socket.create_connection(seat.address), silence_s=30, name="seat")
    if proven:
        tcp_handshake.greet(stream, SECRET, hello(), time.monotonic() + 30)
    with suppress(FabricError):
        stream.send([memoryview(data)])
    with suppress(OSError):
        stream._sock.shutdown(socket.SHUT_WR)
    assert ended(stream)


def counted(seat: ExpertServer, wire_errors: int) -> None:
    """The connection is closed first."""
    until(lambda: seat.faults.totals().get("wire_error", 0) == wire_errors, f"{wire_errors} are counted")


@FUZZ
@given(data=nearly_frames(), proven=st.booleans())
@example(data=FRAME_OF[Kind.REFUSED], proven=True)
@example(data=FRAME_OF[Kind.DISPATCH], proven=True)  # by a lane, which there is not
def test_a_seat_outlives_whatever_is_sent(seat: ExpertServer, bystander: TcpLink, data: bytes, proven: bool) -> None:
    sent(seat, data, proven=proven)
    assert torch.equal(send(bystander, ONES), ONES)
    assert seat.failure is None
    assert seat.faults.totals().get("error", 0) == 0, "an error that is not in the tree"


@pytest.mark.parametrize("proven", [False, True])
def test_each_damaged_frame_is_counted(seat: ExpertServer, bystander: TcpLink, proven: bool) -> None:
    header = b"\x99\xa1\xff"
    for kind in (99, Kind.HELLO, *((Kind.DISPATCH, Kind.ECHO, Kind.SHARED_STEP) if proven else ())):
        before = seat.faults.totals().get("wire_error", 0)
        sent(seat, framed(kind, header), proven=proven)
        counted(seat, before + 1)
    assert torch.equal(send(bystander, ONES), ONES)


def test_calls_that_would_fill_a_seats_memory_are_refused(seat: ExpertServer, bystander: TcpLink) -> None:
    """Rows of nothing, whose queue has no end; layers that it does not have, each of which would be counted; a row for
    each of a thousand slots, together more than anybody takes."""
    rows, slots = 8192, 1024
    nothing = msgspec.structs.replace(CALL, rows=0, slots=1)
    many = msgspec.structs.replace(nothing, rows=rows, slots=slots)
    wide = [torch.zeros(rows, slots, dtype=torch.int32), torch.zeros(rows, 4)]
    for call, tensors in ((nothing, []), (many, wide)):
        before = seat.faults.totals().get("wire_error", 0)
        sent(seat, b"".join(frame_parts(Kind.DISPATCH, call, tensors)), proven=True)
        counted(seat, before + 1)
    strange = msgspec.structs.replace(nothing, rows=1, layer=7)
    absent = [torch.full((1, 1), -1, dtype=torch.int32), torch.zeros(1, 4)]
    sent(seat, b"".join(frame_parts(Kind.DISPATCH, strange, absent)), proven=True)
    assert 7 not in seat.counts.layer_rows
    assert torch.equal(send(bystander, ONES), ONES)


# attention workers


class Impostor:
    """Takes the part of a seat, knows the secret, and says what a test wants, once for each connection."""

    def __init__(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._said: queue.SimpleQueue[tuple[str, Iterable[bytes]]] = queue.SimpleQueue()
        self._done: queue.SimpleQueue[None] = queue.SimpleQueue()
        threading.Thread(target=self._serve, daemon=True).start()

    @property
    def seat(self) -> Seat:
        port = self._listener.getsockname()[1]
        return Seat(number=1, worker="experts-1", group=0, host="127.0.0.1", port=port)

    def say(self, stage: str, said: Iterable[bytes]) -> None:
        """Return when the other side has ended the connection."""
        self._said.put((stage, said))
        self._done.get(timeout=60)

    def close(self) -> None:
        self._listener.close()

    def _serve(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                try:
                    stage, said = self._said.get_nowait()
                except queue.Empty:
                    sock.close()
                    continue
                with suppress(ExpertMeshError, OSError):
                    self._play(Stream(sock, silence_s=30, name="attention"), stage, said)
                sock.close()
                self._done.put(None)

    @staticmethod
    def _play(stream: Stream, stage: str, said: Iterable[bytes]) -> None:
        """Up to ``stage`` as a seat should, then what it is to say, and then it waits for the other side to end."""
        until, limits = time.monotonic() + 30, Limits(4096, 1 << 16)
        if stage == "proof":
            read_frame(stream, limits, until)
            stream.send(frame_parts(Kind.CHALLENGE, NONCE))
            read_frame(stream, limits, until)
        elif stage in ("echo", "open"):
            tcp_handshake.admit(stream, SECRET, hello(seat=1), until)
            echo = read_frame(stream, limits, until)
            if stage == "open":
                stream.send(frame_parts(Kind.ECHO, tcp_wire.message_of(echo, tcp_wire.Echo), [echo.payload]))
        for data in said:
            stream.send([memoryview(data)])
        stream._sock.shutdown(socket.SHUT_WR)
        ended(stream)


@contextmanager
def deceived(timing: Timing = GENEROUS) -> Iterator[tuple[TcpLink, Impostor]]:
    """An attention worker with an honest seat and one that is not."""
    honest, impostor = serve(timing=timing), Impostor()
    table = table_of(seat_of(honest, 0), impostor.seat)
    try:
        with linked(table, timing=timing, ready=False) as link:
            until(lambda: 0 in link.usable(), "the honest seat is there")
            yield link, impostor
    finally:
        impostor.close()
        honest.close()


def test_an_attention_worker_outlives_whatever_a_seat_says(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(tcp_seat, "_MAX_BACKOFF_S", 0.05)
    with deceived() as (link, impostor), caplog.at_level(logging.ERROR):

        @FUZZ
        @given(st.sampled_from(["hello", "proof", "echo", "open"]), nearly_frames())
        @example("open", FRAME_OF[Kind.ANSWER])  # to a call that nobody made
        def say(stage: str, data: bytes) -> None:
            impostor.say(stage, [data])
            assert doubles(link)

        say()
        assert link.faults().get("error", 0) == 0, "an error that is not in the tree"
        assert [record for record in caplog.records if record.levelno >= logging.ERROR] == []
        assert not any(one.ended for one in link._seats.links.values())


@pytest.mark.parametrize(
    ("stage", "data", "reason"),
    [
        ("hello", b"HTTP/1.1 400 Bad Request\r\n\r\n", "wire_error"),
        ("proof", FRAME_OF[Kind.WELCOME], "secret_mismatch"),
        ("echo", framed(Kind.ECHO, b"\x91\xc1"), "wire_error"),
        ("open", framed(99, b""), "wire_error"),
        ("open", tcp_wire.FIXED.pack(b"EMXF", 2, Kind.ALIVE, 0, 0), "protocol_mismatch"),
        ("open", framed(Kind.FAILED, b"\x93\xa1\xff"), "wire_error"),
        ("open", FRAME_OF[Kind.LANE], "wire_error"),
        ("open", FRAME_OF[Kind.SHARE_REQUEST], "wire_error"),
    ],
)
def test_a_seat_that_does_not_keep_to_the_protocol_is_counted_and_tried_again(
    stage: str, data: bytes, reason: str
) -> None:
    with deceived() as (link, impostor):
        impostor.say(stage, [data])
        until(lambda: link.faults() == {reason: 1}, "it is counted")
        assert doubles(link)
        impostor.say(stage, [data])


def test_a_seat_that_never_stops_talking_is_not_listened_to_for_ever(caplog: pytest.LogCaptureFixture) -> None:
    """Instead of the echo that would prove the connection."""
    with deceived(Timing(handshake_s=1.0, alive_s=0.5, silence_s=30.0)) as (_, impostor):
        impostor.say("echo", repeat(100 * framed(Kind.ALIVE, b"")))
        until(lambda: "took too long" in caplog.text, "it was given up")


# shared memory


def test_memory_handles_are_refused_by_type_whatever_they_say() -> None:
    memory = HostMemory()
    region = memory.share(4096)
    honest = msgspec.msgpack.decode(region.handle, type=MemoryHandle)
    numbers = st.one_of(st.integers(-(1 << 63), (1 << 64) - 1), st.integers(0, 8192))
    changes = st.fixed_dictionaries(
        {},
        optional={
            "kind": st.sampled_from(["host", "cuda", ""]),
            "server": st.one_of(st.just(honest.server), st.text(max_size=200), st.just("\0" * 150)),
            "key": st.one_of(st.just(honest.key), st.binary(max_size=64)),
            "size": numbers,
            "nonce_at": numbers,
            "nonce": st.binary(max_size=40),
        },
    )

    @FUZZ
    @given(st.one_of(changes.map(lambda change: (change, None)), mutated(region.handle).map(lambda raw: ({}, raw))))
    def opened(case: tuple[dict[str, object], bytes | None]) -> None:
        change, raw = case
        data = raw if raw is not None else msgspec.msgpack.encode(msgspec.structs.replace(honest, **change))
        with suppress(FabricError):
            memory.open(data).close()

    opened()
    memory.open(region.handle).close()
    region.close()
    memory.close()


@pytest.mark.parametrize(
    "change",
    [
        {"base": 1 << 63},
        {"base": -1},
        {"deadline_s": float("nan")},
        {"deadline_s": float("inf")},
        {"deadline_s": -1.0},
        {"bucket": 0},
    ],
)
def test_a_step_that_no_kernel_could_run_is_refused_as_it_comes(change: dict[str, float]) -> None:
    with pytest.raises(WireError):
        tcp_wire.decoded(msgspec.msgpack.encode(msgspec.structs.replace(STEP, **change)), sharing.Step, "a step")


# the ranks' proxy


def say(sock: socket.socket, data: bytes) -> None:
    """And wait for the other side to be done with it and close."""
    with suppress(OSError):
        sock.sendall(data)
        sock.shutdown(socket.SHUT_WR)
        while sock.recv(4096):
            pass


def test_the_ranks_proxy_outlives_whatever_is_sent() -> None:
    faults = Faults()
    with socket.create_server(("127.0.0.1", 0)) as store:
        listener = socket.create_server(("127.0.0.1", 0))
        server_proxy = ServerProxy(listener, secret=SECRET, port=store.getsockname()[1], name="rank 0", faults=faults)
        address = listener.getsockname()

        @FUZZ
        @given(nearly_frames())
        def sent(data: bytes) -> None:
            with socket.create_connection(address, timeout=30) as sock:
                say(sock, data)

        sent()
        assert "error" not in faults.totals(), "an error that is not in the tree"
        assert faults.totals()["wire_error"] >= 1
        proxy = ClientProxy("127.0.0.1", address[1], secret=SECRET, name="rank 1")
        with socket.create_connection(("127.0.0.1", proxy.port), timeout=30) as near:
            store.accept()[0].close()  # the connection by which the proxy tried it
            far, _ = store.accept()
            near.sendall(b"rows")
            assert far.recv(4) == b"rows"
            far.close()
        proxy.close()
        server_proxy.close()


def test_a_rank_outlives_whatever_the_proxy_says() -> None:
    port = free_port()

    @FUZZ
    @given(nearly_frames())
    def answered(data: bytes) -> None:
        with socket.create_server(("127.0.0.1", port)) as listener:
            answering = threading.Thread(target=answer, args=(listener, data), daemon=True)
            answering.start()
            with pytest.raises((ExpertMeshError, OSError)):
                ClientProxy("127.0.0.1", port, secret=SECRET, name="rank 1")
            answering.join(30)

    def answer(listener: socket.socket, data: bytes) -> None:
        with listener.accept()[0] as sock:
            say(sock, data)

    answered()


@FUZZ
@given(st.one_of(st.binary(max_size=200), mutated(msgspec.json.encode(
    Facts(worker="w", node="n", fingerprint="f", package="p", dtype="d", exchange="e")
))))  # fmt: skip
def test_what_a_rank_says_of_itself_is_read_or_refused(data: bytes) -> None:
    with suppress(FabricError):
        facts_of_rank(1, data)


def test_a_handle_of_another_kind_keeps_rows_on_tcp() -> None:
    with pytest.raises(FabricError, match="of kind 'cuda', not 'host'"):
        decode_handle(msgspec.msgpack.encode(msgspec.structs.replace(HANDLE, kind="cuda")), "host")
