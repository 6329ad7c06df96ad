"""Where ranks meet: at rank 0's address, and at no other."""

from __future__ import annotations

import errno
import socket
import time
from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import pytest
from msgspec.structs import replace as replace_facts
from testkit.fabric.tcp import idle
from testkit.processes.servers import free_port
from testkit.waiting import until
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from services.errors import ConfigError, FingerprintMismatch, PortInUse, ProtocolMismatch, SecretMismatch
from services.fabric.faults import Faults
from services.fabric.lockstep import store_proxy as lockstep_gate
from services.fabric.lockstep.rendezvous import Facts, Meeting, _compare, _Found, _store, join
from services.fabric.lockstep.store_proxy import ClientProxy
from services.fabric.tcp import handshake as tcp_handshake
from services.fabric.tcp.reception import MAX_UNPROVEN, Arrival
from services.fabric.tcp.versions import Versions

SECRET = b"the secret of all ranks"
FACTS = Facts(worker="w", node="n", fingerprint="f", package="0.0.9", dtype="d", exchange="e")


def meeting(address: str, port: int) -> Meeting:
    return Meeting(rank=0, ranks=2, address=address, port=port, host=address, timeout_s=5, secret=SECRET)


@pytest.fixture
def found() -> Iterator[_Found]:
    """Rank 0's store, and the proxy by which the others reach it."""
    made = _store(meeting("127.0.0.1", free_port()))
    yield made
    made.proxy.close()


def rank_1(found: _Found) -> ClientProxy:
    return ClientProxy("127.0.0.1", found.proxy.port, secret=SECRET, name="rank 1")


def store_at(port: int) -> TCPStore:
    return TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=2))


def test_the_store_is_reached_at_its_address_alone(found: _Found) -> None:
    socket.create_connection(("127.0.0.1", found.proxy.port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", found.proxy.port), timeout=5)
    found.store.set("here", "yes")
    other = store_at(rank_1(found).port)
    assert other.get("here") == b"yes"
    found.proxy.close()
    with pytest.raises(RuntimeError):
        other.get("here")


def test_nobody_reaches_the_store_without_the_secret(found: _Found) -> None:
    other = replace(meeting("127.0.0.1", found.proxy.port), rank=1, secret=b"another secret of ranks")
    with pytest.raises(SecretMismatch, match="does not know this cluster's secret"):
        join(other, FACTS)
    with pytest.raises(RuntimeError):
        store_at(found.proxy.port)


def test_ranks_whose_wires_or_weights_differ_part_by_name() -> None:
    """What they would send each other has no version but this."""
    _compare(1, replace_facts(FACTS, worker="v", node="m"), FACTS)
    with pytest.raises(ConfigError, match="Rank 1 differs in its wire: 2 there, 1 here"):
        _compare(1, replace_facts(FACTS, wire=2), FACTS)
    with pytest.raises(FingerprintMismatch, match="Rank 1 serves different weights"):
        _compare(1, replace_facts(FACTS, weights="tuned"), FACTS)
    with pytest.raises(FingerprintMismatch, match="Rank 1 holds experts in int4-g128, this rank in dense"):
        _compare(1, replace_facts(FACTS, weights=f"{FACTS.weights}+int4-g128"), FACTS)


def test_a_rank_of_a_release_without_a_version_in_common_does_not_wait_for_ever(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lockstep_gate, "admit", partial(tcp_handshake.admit, spoken=Versions(2, 3)))
    here, faults = meeting("127.0.0.1", free_port()), Faults()
    found = _store(here, "9.9.9", faults)
    with pytest.raises(
        ProtocolMismatch, match=r"\(release 0\.0\.9\) speaks version 1 .* \(release 9\.9\.9\) versions 2"
    ):
        join(replace(here, rank=1), FACTS)
    until(lambda: faults.totals() == {"protocol_mismatch": 1}, "it is counted")
    found.proxy.close()


def test_connections_that_say_nothing_keep_nobody_out(found: _Found, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lockstep_gate, "HANDSHAKE_S", 60.0)
    with idle(("127.0.0.1", found.proxy.port), 300):
        rank_1(found).close()
    monkeypatch.setattr(lockstep_gate, "HANDSHAKE_S", 1.0)
    with idle(("127.0.0.1", found.proxy.port), MAX_UNPROVEN) as silent:
        until(lambda: all(closed(sock) for sock in silent), "silent ones are shown out")
        rank_1(found).close()


class Flaky(socket.socket):
    """A listener that has no file descriptor to spare at first."""

    failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if not self.failed:
            self.failed = True
            raise OSError(errno.EMFILE, "too many open files")
        return super().accept()


class Nowhere(lockstep_gate._Proxy):
    def _other(self, near: Arrival) -> socket.socket:
        raise OSError(f"{near.name} is led nowhere")


def test_the_proxy_outlives_a_connection_that_it_could_not_take(caplog: pytest.LogCaptureFixture) -> None:
    listener = Flaky()
    listener.bind(("127.0.0.1", 0))
    listener.listen()
    proxy = Nowhere(listener, "store proxy")
    with socket.create_connection(("127.0.0.1", proxy.port), timeout=20) as sock:
        assert sock.recv(1) == b""
    assert "cannot accept a connection" in caplog.text
    proxy.close()


def test_a_rank_may_be_silent_for_longer_than_a_handshake_may_take(
    found: _Found, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lockstep_gate, "HANDSHAKE_S", 1.0)
    other = store_at(rank_1(found).port)
    time.sleep(2.5)
    found.store.set("here", "yes")
    assert other.get("here") == b"yes"


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
