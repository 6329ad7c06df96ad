"""Hosts as namespaces: reached, cut, limited, delayed, and gone afterwards."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from testkit.processes.iproute import delay_obstacle, obstacle, run
from testkit.processes.netns import Host, Network, open_network, sweep
from testkit.waiting import LIMIT_S, until

ECHO = """
import socket, sys
listener = socket.create_server(("::", 7), family=socket.AF_INET6, dualstack_ipv6=True)
print(socket.gethostname(), flush=True)
while True:
    connection, _ = listener.accept()
    while data := connection.recv(1 << 16):
        connection.sendall(data)
"""


@contextlib.contextmanager
def echo(host: Host) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(host.command([sys.executable, "-c", ECHO]), stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline().strip() == host.name
        yield process
    finally:
        process.kill()
        process.wait()


def there_and_back(connection: socket.socket, data: bytes = b"x") -> float:
    """Seconds for ``data`` to come back whole and in order."""
    started = time.monotonic()
    connection.sendall(data)
    back = b""
    while len(back) < len(data):
        back += connection.recv(1 << 20)
    assert back == data
    return time.monotonic() - started


def test_a_host_has_a_name_two_addresses_and_a_cable_that_can_be_pulled(network: Network) -> None:
    host = network.host("a")
    with echo(host):
        for address in (host.address, host.address6):
            with socket.create_connection((address, 7), 5) as connection:
                there_and_back(connection)
                host.cable.cut()
                connection.settimeout(0.3)
                with pytest.raises(TimeoutError):
                    there_and_back(connection, b"while cut")
                host.cable.mend()
                connection.settimeout(20)
                assert connection.recv(9) == b"while cut", "TCP sends it again"


def test_hosts_reach_each_other_and_nothing_else(network: Network) -> None:
    a, b = network.host("a"), network.host("b")
    script = f"import socket; socket.create_connection(('{b.address}', 7), 5); print(socket.gethostname())"
    with echo(b):
        said = subprocess.run(a.command([sys.executable, "-c", script]), capture_output=True, text=True, check=True)
    assert said.stdout.strip() == "a"
    assert "default" not in run("ip", "-n", a.namespace, "route")


def test_a_delay_holds_every_frame_keeps_order_and_ends(network: Network) -> None:
    if (reason := delay_obstacle()) is not None:
        pytest.skip(f"hosts as network namespaces: {reason}")
    host = network.host("a")
    with echo(host), socket.create_connection((host.address, 7), 20) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for seconds in (0.05, 0.02):
            host.cable.delay(seconds)
            assert all(there_and_back(connection) >= 2 * seconds for _ in range(3))
        there_and_back(connection, bytes(range(256)) * 200)
        host.cable.delay(0)
        until(lambda: there_and_back(connection) < 2 * 0.02, "no frame is held")


def test_a_limit_bounds_the_rate_in_each_direction(network: Network) -> None:
    host = network.host("a")
    data = bytes(1 << 20)
    with echo(host), socket.create_connection((host.address, 7), 60) as connection:
        host.cable.limit(20)
        limited = there_and_back(connection, data)
        assert limited >= 0.8 * (len(data) - 2 * 65_536) * 8 / 20e6, "2.5 MB/s, less a burst each way"
        host.cable.limit(None)
        until(lambda: there_and_back(connection, data) < limited / 2, "the rate is not bounded")


def test_a_signal_reaches_the_process_itself(network: Network) -> None:
    with echo(network.host("a")) as process:
        assert Path(f"/proc/{process.pid}/exe").resolve() == Path(sys.executable).resolve()


ABANDONED = """
import os, subprocess, sys
from testkit.processes.netns import Network
network = Network()
host = network.host("left")
process = subprocess.Popen(host.command([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]),
                           stdout=subprocess.PIPE)
process.stdout.readline()
host.cable.delay(0.01)
print(host.namespace, process.pid, flush=True)
sys.stdin.read()
os.kill(os.getpid(), 9)
"""


def test_what_a_killed_test_left_behind_is_swept(network: Network) -> None:
    if (reason := delay_obstacle()) is not None:
        pytest.skip(f"hosts as network namespaces: {reason}")
    tests = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", ABANDONED]
    killed = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tests)
    assert killed.stdin is not None
    assert killed.stdout is not None
    namespace, pid = killed.stdout.readline().split()
    assert namespace in run("ip", "netns")
    assert _runs(pid)
    mine = network.host("stays")
    killed.stdin.close()
    assert killed.wait(LIMIT_S) == -9  # from now on any process may sweep, not this one alone
    sweep()
    until(lambda: namespace not in run("ip", "netns"), "its namespace is gone")
    assert mine.namespace in run("ip", "netns"), "another test's hosts stay"
    until(lambda: not _runs(pid), "its process is gone")


def _runs(pid: str) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_nothing_is_left_behind() -> None:
    if (reason := obstacle()) is not None:
        pytest.skip(f"hosts as network namespaces: {reason}")
    with open_network() as network:
        host = network.host("a")
        left = subprocess.Popen(host.command(["sleep", "600"]))
        names = [path for path in run("ip", "netns").split() if path.startswith(host.namespace.rpartition("-")[0])]
        devices = [word for word in run("ip", "-o", "link").split() if word.startswith(f"em{os.getpid()}.")]
        assert names
        assert devices
    assert left.wait(10) == -9
    assert not [name for name in names if name in run("ip", "netns").split()]
    assert not [device for device in devices if device in run("ip", "-o", "link").split()]
