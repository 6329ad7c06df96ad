"""What becomes of memory whose owner is killed. ``-m perf.fabric.exchange.lifetime``, an owner and a writer on two
GPUs.
"""

from __future__ import annotations

import time

import torch

from perf.fabric.exchange.bare_triton import put
from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.ipc import memory_by
from perf.fabric.exchange.world import device_of

WORDS = 4096


def main() -> None:
    parent = Parent()
    device, kind = device_of(parent.facts["gpu"]), parent.facts["memory"]
    memory = memory_by(kind, device)
    began = time.perf_counter()
    region = memory.share(8192 + 2 * WORDS)
    shared_ms = (time.perf_counter() - began) * 1e3
    parent.report(handle=region.handle.hex(), ms=shared_ms)
    ones = torch.ones(WORDS, device=device).bfloat16()
    counter = torch.ones(1, dtype=torch.int64, device=device)
    flags = torch.zeros(1, dtype=torch.int64, device=device)
    target = torch.zeros(1, dtype=torch.int64, device=device)
    for command in parent.commands():
        if command["do"] == "open":
            began = time.perf_counter()
            there = memory.open(bytes.fromhex(command["handle"]))
            target.fill_(there.address + 8192)
            flags.fill_(there.address)
            parent.report(ms=(time.perf_counter() - began) * 1e3)
        elif command["do"] == "write":
            put[(2,)](ones, target, WORDS, 2048, 2, 0, flags, counter)
            torch.cuda.synchronize()
            parent.report(alive=float((ones @ ones).item()))
        elif command["do"] == "close":
            began = time.perf_counter()
            there.close()
            parent.report(ms=(time.perf_counter() - began) * 1e3)
        else:
            torch.cuda.synchronize()
            parent.report(sum=float(region.bytes[8192:].view(torch.bfloat16).float().sum()))


if __name__ == "__main__":
    main()
