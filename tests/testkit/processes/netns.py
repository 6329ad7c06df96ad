"""Hosts as network namespaces of one machine, on a switch: links that are cut, slowed down and delayed.

    with open_network() as network:
        host = network.host("experts-1")
        process = subprocess.Popen(host.command(["expertmesh", "experts", "--host", host.address, ...]))
        host.cable.cut(); host.cable.mend(); host.cable.limit(100); host.cable.delay(0.05)

A switch is a bridge in a namespace of its own; the caller's namespace is plugged into it too, so tests reach every
host by its address. A cut is a pulled cable: both ends stay up and nothing arrives. Everything vanishes with the
block; what a killed test left behind goes when the next network is opened.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import os
import re
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from testkit.processes.cable import Cable
from testkit.processes.iproute import AS_HOST, BRIDGE, COMMAND_S, PREFIX, NetworkError, has_netem, run

_LOCK = Path("/tmp/expertmesh-netns.lock")
_NAMED = Path("/run/netns")
_SUBNETS = [f"198.18.{number}" for number in range(256)]
"""RFC 2544: for tests between network devices; no host on the internet has such an address."""


@contextlib.contextmanager
def open_network() -> Iterator[Network]:
    """A switch without hosts, for the length of the block."""
    sweep()
    network = Network()
    try:
        yield network
    finally:
        network.close()


class Network:
    """Hosts 198.18.N.2, .3, ... and fd00:N::2, ...; the caller is .1."""

    def __init__(self) -> None:
        self.hosts: list[Host] = []
        self._netem = has_netem()
        with _LOCK.open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)  # two processes must not take the same subnet
            self._number = _free_subnet()
            self._name = f"{PREFIX}-{os.getpid()}-{self._number}"
            self._numbers = itertools.count(1)
            self._own = f"em{os.getpid()}.{self._number}"
            try:
                self._switch = self._namespace("switch")
                run("ip", "-n", self._switch, "link", "add", "sw", *BRIDGE)
                run("ip", "-n", self._switch, "link", "set", "sw", "up")
                self._plug(self._own, str(os.getpid()), [])
            except BaseException:
                self.close()  # nobody else would: there is no network
                raise

    @property
    def address(self) -> str:
        """Of the caller, as hosts see it."""
        return f"{_SUBNETS[self._number]}.1"

    def host(self, name: str) -> Host:
        """A new host with that name; its link is up."""
        inside = self._namespace(name)
        number = self._plug("eth0", inside, ["-n", inside])
        run("ip", "-n", inside, "link", "set", "lo", "up")
        cable = Cable(switch=self._switch, number=number, inside=inside, netem=self._netem)
        self.hosts.append(
            Host(
                name=name,
                namespace=inside,
                address=self._address(number),
                address6=self._address6(number),
                cable=cable,
            )
        )
        return self.hosts[-1]

    def close(self) -> None:
        """Ends what still runs on the hosts, with -9, and removes everything."""
        for host in self.hosts:
            host.cable.close()
        with contextlib.suppress(NetworkError):  # it goes with the switch too, but some moments later
            run("ip", "link", "del", self._own)
        _remove(path.name for path in _NAMED.glob(f"{self._name}-*"))

    def _namespace(self, name: str) -> str:
        full = f"{self._name}-{name}"
        run("ip", "netns", "add", full)
        return full

    def _plug(self, device: str, namespace: str, where: Sequence[str]) -> int:
        """A cable from ``device`` in ``namespace`` (name or pid) to a new port of the switch; its number."""
        number = next(self._numbers)
        pair = ["type", "veth", "peer", "name", device, "netns", namespace]
        run("ip", "-n", self._switch, "link", "add", f"p{number}", *pair)
        run("ip", "-n", self._switch, "link", "set", f"p{number}", "master", "sw", "up")
        run("ip", *where, "address", "add", f"{self._address(number)}/24", "dev", device)
        run("ip", *where, "address", "add", f"{self._address6(number)}/64", "dev", device, "nodad")
        run("ip", *where, "link", "set", device, "up")
        return number

    def _address(self, number: int) -> str:
        return f"{_SUBNETS[self._number]}.{number}"

    def _address6(self, number: int) -> str:
        return f"fd00:198:18:{self._number:x}::{number:x}"


@dataclass(frozen=True, kw_only=True, slots=True)
class Host:
    """One namespace with its cable. Processes in it see ``name`` as their host's name."""

    name: str
    namespace: str
    address: str
    address6: str
    cable: Cable

    def command(self, args: Sequence[str]) -> list[str]:
        """``args`` on this host. The process keeps its pid: signals to it reach the program itself."""
        return ["ip", "netns", "exec", self.namespace, "unshare", "--uts", "sh", "-c", AS_HOST, self.name, *args]


def sweep() -> None:
    """Removes the networks of processes that are no more, with what runs in them."""
    names = [path.name for path in _NAMED.glob(f"{PREFIX}-*-*")] if _NAMED.exists() else []
    _remove(name for name in names if not _alive(name))


def _alive(name: str) -> bool:
    match = re.fullmatch(rf"{PREFIX}-(\d+)-.+", name)
    return match is None or os.path.exists(f"/proc/{match[1]}")


def _remove(names: Iterator[str] | Sequence[str]) -> None:
    names = list(names)
    for name in names:
        _end_processes(name)
    for name in names:
        with contextlib.suppress(NetworkError):  # somebody else sweeps too
            run("ip", "netns", "del", name)


def _end_processes(name: str) -> None:
    """A namespace without a name lives on as long as a process in it."""
    deadline = time.monotonic() + COMMAND_S
    with contextlib.suppress(NetworkError):  # somebody else has removed it
        while (pids := run("ip", "netns", "pids", name).split()) and time.monotonic() < deadline:
            for pid in map(int, pids):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            time.sleep(0.01)


def _free_subnet() -> int:
    used = set(re.findall(r"198\.18\.(\d+)\.", run("ip", "-4", "address", "show")))
    names = {path.name.split("-")[2] for path in _NAMED.glob(f"{PREFIX}-*-*-*")} if _NAMED.exists() else set()
    start = os.getpid()
    for number in ((start + offset) % len(_SUBNETS) for offset in range(len(_SUBNETS))):
        if str(number) not in used | names:
            return number
    raise NetworkError("all of 198.18.0.0/16 is in use")
