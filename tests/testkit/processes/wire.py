"""A cable that delays or loses frames: two TAP devices and what goes between them, where the kernel has no netem.

    wire.py DEVICE DEVICE      makes both, says "ready", takes lines from stdin ("<delay in s> <share of frames that are
                               lost>"); ends with it

Frames come with the virtio header and unsegmented (up to 64 KiB of TCP), so a frame costs the same few microseconds
however large it is, and checksums are left to whoever really needs them. Order is kept, also when the delay changes.
Runs alone, without this project's packages.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import random
import select
import struct
import sys
import time
from collections import deque

# linux/if_tun.h
_TUNSETIFF, _TUNSETOFFLOAD, _TUNSETVNETHDRSZ = 0x400454CA, 0x400454D0, 0x400454D8
_IFF_TAP, _IFF_NO_PI, _IFF_VNET_HDR = 0x0002, 0x1000, 0x4000
_TUN_F_CSUM, _TUN_F_TSO4, _TUN_F_TSO6 = 0x01, 0x02, 0x04
_HEADER_BYTES = 10
_FRAME_BYTES = _HEADER_BYTES + 65_536 + 64
_MAX_HELD_BYTES = 64 << 20
"""In one direction; a real cable drops too."""


def open_tap(name: str) -> int:
    """A file descriptor whose device lives as long as it is open."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TAP | _IFF_NO_PI | _IFF_VNET_HDR))
    fcntl.ioctl(descriptor, _TUNSETVNETHDRSZ, struct.pack("i", _HEADER_BYTES))
    fcntl.ioctl(descriptor, _TUNSETOFFLOAD, _TUN_F_CSUM | _TUN_F_TSO4 | _TUN_F_TSO6)
    return descriptor


class Direction:
    """Frames from ``source`` on their way to ``target``."""

    def __init__(self, source: int, target: int) -> None:
        self.source = source
        self._target = target
        self._held: deque[tuple[float, bytes]] = deque()
        self._bytes = 0

    @property
    def due(self) -> float:
        """When the oldest frame is to go on."""
        return self._held[0][0] if self._held else float("inf")

    def take(self, delay_s: float, lost_share: float) -> None:
        """All that has arrived, but what is lost."""
        with contextlib.suppress(BlockingIOError):
            while True:
                frame = os.read(self.source, _FRAME_BYTES)
                if random.random() >= lost_share and self._bytes + len(frame) <= _MAX_HELD_BYTES:
                    last = self._held[-1][0] if self._held else 0.0
                    self._held.append((max(last, time.monotonic() + delay_s), frame))
                    self._bytes += len(frame)

    def give(self) -> None:
        """All that is due. A device that is down refuses frames: they are lost."""
        now = time.monotonic()
        while self._held and self._held[0][0] <= now:
            _, frame = self._held.popleft()
            self._bytes -= len(frame)
            with contextlib.suppress(OSError):
                os.write(self._target, frame)


def main(first: str, second: str) -> None:
    a, b = open_tap(first), open_tap(second)
    directions = [Direction(a, b), Direction(b, a)]
    delay_s = lost_share = 0.0
    print("ready", flush=True)
    while True:
        wait = min(direction.due for direction in directions) - time.monotonic()
        readable, _, _ = select.select([a, b, 0], [], [], None if wait == float("inf") else max(0.0, wait))
        if 0 in readable:
            lines = os.read(0, 4096)
            if not lines:
                return
            delay_s, lost_share = map(float, lines.splitlines()[-1].split())
        for direction in directions:
            if direction.source in readable:
                direction.take(delay_s, lost_share)
            direction.give()


if __name__ == "__main__":
    main(*sys.argv[1:])
