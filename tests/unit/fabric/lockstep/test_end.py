"""The end of a process that was a rank: torch's threads end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys

_RANKS = """
import sys
import time
from concurrent.futures import ThreadPoolExecutor

import torch
from torch.distributed import HashStore

from services.fabric.lockstep.gloo import GlooWire, gloo_group


class Late:
    def __del__(self, sleep=time.sleep):
        sleep(0.5)  # the interpreter ends, and others may have the GIL


sys.modules["late"] = Late()
store = HashStore()


def wire(rank):
    return GlooWire(gloo_group(store, rank, 2, host="127.0.0.1", timeout_s=20), near=(0, 1), timeout_s=20)


with ThreadPoolExecutor(2) as pool:
    wires = list(pool.map(wire, range(2)))
sums = [torch.ones(1) for _ in wires]
seen = [each.numpy() for each in sums]
sys.setswitchinterval(1000)  # from here on nobody else gets the GIL before this thread lets go of it
for each, sum in zip(wires, sums):
    each._group.allreduce([sum])
while any(each[0] != 2 for each in seen):
    pass
for each in wires:
    each.close()
"""


def test_what_gloo_has_still_to_free_does_not_abort_the_process() -> None:
    """An all-reduce is done as late as can be: its threads want the GIL to free its tensors, and have not had it."""
    ended = subprocess.run([sys.executable, "-c", _RANKS], capture_output=True, text=True, timeout=60, check=False)
    assert (ended.returncode, ended.stderr) == (0, "")
