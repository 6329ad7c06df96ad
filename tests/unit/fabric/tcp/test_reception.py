"""Connections that prove nothing keep nobody out, and cost little: at a seat and the memory server."""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from contextlib import ExitStack
from errno import EAGAIN
from pathlib import Path

import pytest
from testkit.fabric.tcp import Serve, doubles, idle, linked, table_at
from testkit.processes.certificates import Authority
from testkit.waiting import until

from services.fabric.shared_memory.fd_server import FdServer, fetch_fd
from services.fabric.tcp.frames import Kind, frame_parts
from services.fabric.tcp.handshake import Nonce
from services.fabric.tcp.peer import Timing
from services.fabric.tcp.reception import MAX_UNPROVEN
from services.fabric.tcp.server import ExpertServer
from services.fabric.tcp.tls import ClientTls, server_tls

GENEROUS = Timing(handshake_s=60.0, alive_s=0.5, silence_s=30.0)
"""No connection ends for being late while a test runs."""
UNKNOWN_CLIENTS = 300


def unproven(server: ExpertServer) -> int:
    return len(server._reception._unproven)


def threads(server: ExpertServer) -> int:
    return len(server._reception._threads)


@pytest.mark.parametrize("encrypted", [False, True])
def test_idle_unknown_clients_keep_no_attention_worker_out(served: Serve, encrypted: bool, tmp_path: Path) -> None:
    files = Authority(tmp_path).certificate("DNS:localhost,IP:127.0.0.1") if encrypted else (None, None)
    tls = ClientTls(tmp_path / "ca.crt") if encrypted else None
    server = served(timing=GENEROUS, tls=server_tls(*files), max_connections=1)
    with idle(server.address, UNKNOWN_CLIENTS):
        until(lambda: unproven(server) == MAX_UNPROVEN, "the room for unknown clients is full")
        with linked(table_at(server), timing=GENEROUS, tls=tls) as link:
            assert doubles(link)
            with idle(server.address, UNKNOWN_CLIENTS):
                until(lambda: server.faults.totals()["crowded"] >= 2 * UNKNOWN_CLIENTS - MAX_UNPROVEN, "more")
                assert threads(server) <= MAX_UNPROVEN + 1
                assert doubles(link)
            assert [seat.connections for seat in link._seats.links.values()] == [1], "who has proven itself stays"


def dripped(sock: socket.socket, data: bytes) -> int:
    """How many of these bytes, sent one by one, the other side waits for."""
    for taken, byte in enumerate(data):
        sock.sendall(bytes([byte]))
        try:
            if not sock.recv(1):
                return taken
        except TimeoutError:
            continue
        except OSError:
            return taken
    return len(data)


def test_an_unknown_client_that_drips_bytes_is_disconnected_when_a_handshake_must_be_over(served: Serve) -> None:
    server = served(timing=Timing(handshake_s=1.0, alive_s=0.5, silence_s=30.0))
    with socket.create_connection(server.address, timeout=0.1) as dripping:
        taken = dripped(dripping, b"".join(frame_parts(Kind.HELLO, Nonce(nonce=b"n" * 32))))
    assert 1 <= taken < 20, "a byte each tenth of a second, for a second"
    until(lambda: threads(server) == 0, "nothing is left of it")


def test_connections_that_have_proven_themselves_have_a_bound_of_their_own(served: Serve) -> None:
    server = served(timing=GENEROUS, max_connections=1)
    table = table_at(server)
    with linked(table, timing=GENEROUS, ready=False) as second:
        with linked(table, timing=GENEROUS, ready=False) as first:
            until(lambda: len(first.usable()) + len(second.usable()) == 1, "one of them is in")
            late = second if first.usable() else first
            links = late._seats.links
            until(lambda: [link.problem.code for link in links.values() if link.problem] == ["seat_full"], "full")
            assert server.faults.totals()["seat_full"] >= 1
        until(lambda: len(second.usable()) == 1, "there is room once the first is gone")


def test_unknown_clients_do_not_fill_the_log(served: Serve, caplog: pytest.LogCaptureFixture) -> None:
    server = served(timing=GENEROUS)
    with caplog.at_level(logging.INFO):
        for _ in range(40):
            with socket.create_connection(server.address, timeout=30) as noisy:
                noisy.sendall(b"GET / HTTP/1.1\r\n" + b"x" * 100)
                while noisy.recv(4096):
                    pass
        until(lambda: server.faults.totals()["wire_error"] == 40, "all are counted")
    notes = [record for record in caplog.records if "does not speak" in record.getMessage()]
    assert 1 <= len(notes) <= 6, "one in ten seconds"


def test_neighbours_who_ask_for_nothing_keep_nobody_from_memory() -> None:
    server = FdServer()
    file = os.memfd_create("test")
    key = server.publish(file)
    try:
        with ExitStack() as stack:
            for _ in range(100):
                neighbour = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
                neighbour.settimeout(30)
                until(lambda: neighbour.connect_ex(f"\0{server.name}") != EAGAIN, "there is room in the line")  # noqa: B023
            began = time.monotonic()
            os.close(fetch_fd(server.name, key))
            assert time.monotonic() - began < 4, "one of them alone may take five seconds"
    finally:
        server.close()
        os.close(file)


def test_a_machine_without_threads_to_spare_does_not_end_the_seat(
    served: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = served(timing=GENEROUS)
    start = threading.Thread.start

    def scarce(thread: threading.Thread) -> None:
        if thread.name.startswith("attention worker"):
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", scarce)
        with socket.create_connection(server.address, timeout=30) as refused:
            assert refused.recv(1) == b""
    assert server.failure is None
    with linked(table_at(server), timing=GENEROUS) as link:
        assert doubles(link)
