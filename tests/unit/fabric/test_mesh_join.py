"""Where ranks meet: at rank 0's address, and at no other."""

from __future__ import annotations

import errno
import socket
import time
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest
from testkit.servers import free_port, wait_until
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.errors import ConfigError, PortInUse, SecretMismatch
from services.fabric import mesh_gate
from services.fabric.mesh_gate import Tunnel
from services.fabric.mesh_join import Facts, Meeting, _store, join

SECRET = b"the secret of all ranks"


def meeting(address: str, port: int) -> Meeting:
    return Meeting(rank=0, ranks=2, address=address, port=port, host=address, timeout_s=5, secret=SECRET)


def test_the_store_is_reached_at_its_address_alone() -> None:
    port = free_port()
    found = _store(meeting("127.0.0.1", port))
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    found.store.set("here", "yes")
    tunnel = Tunnel("127.0.0.1", port, secret=SECRET, name="rank 1")
    other = TCPStore("127.0.0.1", tunnel.port, is_master=False, wait_for_workers=False)
    assert other.get("here") == b"yes"
    found.door.close()
    with pytest.raises(RuntimeError):
        other.get("here")


def test_nobody_reaches_the_store_without_the_secret() -> None:
    port = free_port()
    found = _store(meeting("127.0.0.1", port))
    with pytest.raises(SecretMismatch):
        Tunnel("127.0.0.1", port, secret=b"another secret of ranks", name="rank 1")
    with pytest.raises(RuntimeError):
        TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))
    found.door.close()


def test_a_rank_with_another_secret_does_not_wait_for_ever() -> None:
    port = free_port()
    found = _store(meeting("127.0.0.1", port))
    facts = Facts(worker="w", node="n", fingerprint="f", package="p", dtype="d", exchange="e")
    other = replace(meeting("127.0.0.1", port), rank=1, secret=b"another secret of ranks")
    with pytest.raises(SecretMismatch, match="does not know this cluster's secret"):
        join(other, facts)
    found.door.close()


def test_connections_that_say_nothing_keep_nobody_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_gate, "HANDSHAKE_S", 1.0)
    port = free_port()
    found = _store(meeting("127.0.0.1", port))
    silent = [socket.create_connection(("127.0.0.1", port)) for _ in range(mesh_gate.MOST_PENDING)]
    wait_until(lambda: all(closed(sock) for sock in silent), 30, "silent ones are shown out")
    Tunnel("127.0.0.1", port, secret=SECRET, name="rank 1").close()
    found.door.close()


class Flaky(socket.socket):
    """A listener that has no file descriptor to spare at first."""

    failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


class Nowhere(mesh_gate._Door):
    def _other(self, near: socket.socket, peer: str) -> socket.socket:  # noqa: ARG002
        raise OSError(f"{peer} is led nowhere")


def test_the_gate_outlives_a_connection_that_it_could_not_take(caplog: pytest.LogCaptureFixture) -> None:
    listener = Flaky()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    door = Nowhere(listener, "gate")
    with socket.create_connection(("127.0.0.1", door.port), timeout=20) as sock:
        assert sock.recv(1) == b""
    assert "could not take a connection" in caplog.text
    door.close()


def test_a_rank_may_be_silent_for_longer_than_a_handshake_may_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mesh_gate, "HANDSHAKE_S", 1.0)
    port = free_port()
    found = _store(meeting("127.0.0.1", port))
    tunnel = Tunnel("127.0.0.1", port, secret=SECRET, name="rank 1")
    other = TCPStore("127.0.0.1", tunnel.port, is_master=False, wait_for_workers=False)
    time.sleep(2.5)
    found.store.set("here", "yes")
    assert other.get("here") == b"yes"
    found.door.close()


def closed(sock: socket.socket) -> bool:
    sock.settimeout(0.01)
    try:
        return sock.recv(1 << 16) == b""
    except TimeoutError:
        return False
    except OSError:
        return True


def test_a_taken_port_may_become_free_and_another_hosts_address_never_fits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse):
        _store(meeting("127.0.0.1", taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen"):
        _store(meeting("192.0.2.1", 7200))
