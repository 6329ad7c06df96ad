"""Where ranks meet: at rank 0's address, and at no other."""

from __future__ import annotations

import socket

import pytest

from services.errors import ConfigError, PortInUse
from services.fabric.mesh_join import Meeting, _store


def meeting(address: str, port: int) -> Meeting:
    return Meeting(rank=0, ranks=2, address=address, port=port, host=address, timeout_s=5)


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as found:
        port: int = found.getsockname()[1]
        return port


def test_the_store_is_reached_at_its_address_alone() -> None:
    port = free_port()
    store = _store(meeting("127.0.0.1", port))
    socket.create_connection(("127.0.0.1", port), timeout=5).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.2", port), timeout=5)
    store.set("here", "yes")
    assert store.get("here") == b"yes"


def test_a_taken_port_may_become_free_and_another_hosts_address_never_fits() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, pytest.raises(PortInUse):
        _store(meeting("127.0.0.1", taken.getsockname()[1]))
    with pytest.raises(ConfigError, match="cannot listen"):
        _store(meeting("192.0.2.1", 7200))
