"""A cable from the switch to a host: pulled, cut in one direction, limited in rate, delayed, lossy."""

from __future__ import annotations

import selectors
import subprocess
import sys
from pathlib import Path
from typing import Literal

from testkit.processes.iproute import BRIDGE, COMMAND_S, NetworkError, run

_WIRE = Path(__file__).with_name("wire.py")
Way = Literal["in", "out"]
"""To the host, or from it."""


class Cable:
    """The cable between port ``number`` of the switch and eth0 of namespace ``inside``."""

    def __init__(self, *, switch: str, number: int, inside: str, netem: bool) -> None:
        self._switch, self._port, self._inside, self._number = switch, f"p{number}", inside, number
        self._netem = netem
        self._delay_s = 0.0
        self._lost_share = 0.0
        self._mbit_per_s: float | None = None
        self._silent: Way | None = None
        self._wire: subprocess.Popen[bytes] | None = None

    def cut(self) -> None:
        """Pull it: from now on nothing arrives, in either direction, and nobody is notified."""
        run("ip", "-n", self._switch, "link", "set", self._port, "down")

    def silence(self, way: Way | None) -> None:
        """Drop all frames of one direction, while those of the other one arrive. None ends it."""
        self._silent = way
        self._shape()

    def mend(self) -> None:
        run("ip", "-n", self._switch, "link", "set", self._port, "up")

    def delay(self, seconds: float) -> None:
        """Hold every frame for so long, in each direction: a round trip takes twice as long. 0 ends it."""
        self._delay_s = seconds
        self._shape()

    def lose(self, share: float) -> None:
        """Drop so many of all frames, in each direction. 0 ends it."""
        self._lost_share = share
        self._shape()

    def limit(self, mbit_per_s: float | None) -> None:
        """Bound the rate, in each direction. None ends it."""
        self._mbit_per_s = mbit_per_s
        self._shape()

    def _shape(self) -> None:
        delay_s, lost_share = (self._delay_s, self._lost_share) if self._netem else (0.0, 0.0)
        for way, namespace, device in (("out", self._inside, "eth0"), ("in", self._switch, self._port)):
            if way == self._silent:  # a queue without room
                run("tc", "-n", namespace, "qdisc", "replace", "dev", device, "root", "pfifo", "limit", "0")
            else:
                _queue(namespace, device, self._mbit_per_s, delay_s, lost_share)
        if not self._netem:
            self._treat(self._delay_s, self._lost_share)

    def close(self) -> None:
        self._treat(0.0, 0.0)

    def _treat(self, delay_s: float, lost_share: float) -> None:
        """Delays and drops by a process between two TAP devices, there only meanwhile: other links lose nothing."""
        needed = delay_s > 0 or lost_share > 0
        if needed and self._wire is None:
            self._wire = self._splice()
        if self._wire is None:
            return
        assert self._wire.stdin is not None
        if needed:
            self._wire.stdin.write(f"{delay_s} {lost_share}\n".encode())
            self._wire.stdin.flush()
            return
        run("ip", "-n", self._switch, "link", "set", self._port, "master", "sw")
        self._wire.stdin.close()  # it ends, and takes its devices along
        try:
            self._wire.wait(COMMAND_S)
        except subprocess.TimeoutExpired:
            self._wire.kill()
            self._wire.wait()
        self._wire = None
        run("ip", "-n", self._switch, "link", "del", f"d{self._number}")

    def _splice(self) -> subprocess.Popen[bytes]:
        """Port - bridge d - TAP - wire - TAP - bridge sw."""
        here, there, bridge = f"t{self._number}a", f"t{self._number}b", f"d{self._number}"
        run("ip", "-n", self._switch, "link", "add", bridge, *BRIDGE)
        run("ip", "-n", self._switch, "link", "set", bridge, "up")
        command = ["ip", "netns", "exec", self._switch, sys.executable, str(_WIRE), here, there]
        wire = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert wire.stdout is not None
        with selectors.DefaultSelector() as selector:  # select() refuses descriptors from 1024 on
            selector.register(wire.stdout, selectors.EVENT_READ)
            said = wire.stdout.readline() if selector.select(COMMAND_S) else b""
        if said != b"ready\n":
            wire.kill()
            wire.wait()
            raise NetworkError(f"the wire did not start: {said!r}")
        for tap, master in ((here, bridge), (there, "sw")):
            run("ip", "-n", self._switch, "link", "set", tap, "master", master, "up")
        run("ip", "-n", self._switch, "link", "set", self._port, "master", bridge)
        return wire


def _queue(namespace: str, device: str, mbit_per_s: float | None, delay_s: float, lost_share: float) -> None:
    """The queueing discipline of what leaves ``device``. A limit alone drops what would wait over 200 ms."""
    where = ("-n", namespace, "qdisc")
    rate = [] if mbit_per_s is None else ["rate", f"{mbit_per_s}mbit"]
    if delay_s > 0 or lost_share > 0:
        delay = ["delay", f"{round(delay_s * 1e6)}us"]
        kind = ["netem", *delay, "loss", f"{100 * lost_share:g}%", "limit", "100000", *rate]
    elif mbit_per_s is not None:
        burst = max(65_536, round(mbit_per_s * 1e6 / 8 * 0.005))  # bytes: a frame of offloaded TCP, or 5 ms
        kind = ["tbf", *rate, "burst", str(burst), "latency", "200ms"]
    elif "qdisc noqueue" in run("tc", *where, "show", "dev", device):
        return
    else:
        run("tc", *where, "del", "dev", device, "root")
        return
    run("tc", *where, "replace", "dev", device, "root", *kind)
