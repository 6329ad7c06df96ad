"""Round trips of bare puts, flags and waits in a graph, between two GPUs. ``-m perf.fabric.exchange.bare``, twice.

Both sides replay their graph on command; the counter on the device goes on from replay to replay.
"""

from __future__ import annotations

import torch

from perf.fabric.exchange.bare_triton import put, stamp, wait
from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.ipc import memory_by
from perf.fabric.exchange.world import device_of

FLAGS = 2048
DEADLINE_NS = 500_000_000


class Bare:
    """One end of the pair. ``_peer``, ``_peer_flags``: addresses of the other end's rows and flags."""

    def __init__(self, memory: str, device: torch.device, asks: bool, max_bytes: int, trips: int) -> None:
        self._asks, self._trips = asks, trips
        self._memory = memory_by(memory, device)
        self.region = self._memory.share(FLAGS + max_bytes)
        self._flags = self.region.bytes[:FLAGS].view(torch.int64)
        inbox = self.region.bytes[FLAGS:].view(torch.bfloat16)
        self._source = torch.randn(inbox.numel(), device=device).bfloat16() if asks else inbox
        self._counter = torch.ones(1, dtype=torch.int64, device=device)
        self._failed = torch.zeros(1, dtype=torch.int64, device=device)
        self._stamps = torch.zeros(2, dtype=torch.int64, device=device)
        self._peer, self._peer_flags = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self._graph = torch.cuda.CUDAGraph()
        self.stream = torch.cuda.Stream(device)
        torch.cuda.synchronize()

    def open(self, handle: str) -> None:
        self._there = self._memory.open(bytes.fromhex(handle))

    def capture(self, size: int) -> None:
        """Compiled against own memory first, so that the peer sees nothing of it."""
        self._aim(self.region.bytes.data_ptr())
        self._failed.fill_(1)
        self._body(size)
        self.stream.synchronize()
        self._failed.zero_()
        self._counter.fill_(1)
        self._flags.zero_()
        self._aim(self._there.address)
        self.stream.synchronize()
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph, stream=self.stream):
            self._body(size)

    def go(self) -> float:
        """Microseconds of a round trip."""
        self._graph.replay()
        self.stream.synchronize()
        assert int(self._failed) == 0, "a wait passed its deadline"
        first, last = self._stamps.tolist()
        return float(last - first) / 1e3 / (self._trips - 1)

    def _aim(self, address: int) -> None:
        self._peer.fill_(address + FLAGS)
        self._peer_flags.fill_(address)

    def _body(self, size: int) -> None:
        programs = min(128, size // 4096)
        for trip in range(self._trips):
            for part in (self._send, self._receive) if self._asks else (self._receive, self._send):
                part(size, programs)
            if self._asks and trip in (0, self._trips - 1):
                stamp[(1,)](self._stamps, min(trip, 1))

    def _send(self, size: int, programs: int) -> None:
        back = 0 if self._asks else 1  # the wait before has counted on
        put[(programs,)](self._source, self._peer, size // 2, 2048, programs, back, self._peer_flags, self._counter)

    def _receive(self, _size: int, programs: int) -> None:
        wait[(1,)](self._flags, self._counter, self._failed, programs, DEADLINE_NS)


def main() -> None:
    parent = Parent()
    facts = parent.facts
    end = Bare(facts["memory"], device_of(facts["gpu"]), facts["asks"], facts["max_kib"] << 10, facts["trips"])
    parent.report(handle=end.region.handle.hex())
    commands = parent.commands()
    end.open(next(commands)["handle"])
    with torch.cuda.stream(end.stream):
        for command in commands:
            if command["do"] == "capture":
                end.capture(command["kib"] << 10)
                parent.report(ready=True)
            else:
                parent.report(us=end.go())


if __name__ == "__main__":
    main()
