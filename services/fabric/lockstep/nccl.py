"""Messages of ranks in lock-step between GPUs over NCCL, from and into device memory. Sizes go ahead over gloo.

The sizes say what each rank receives, and show that all ranks are there: NCCL itself waits for a dead peer for ever. So
each exchange costs a wait for the device. Links through shared memory have no such wait.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import Work
from torch.distributed.distributed_c10d import Store

from services.errors import LockstepBroken
from services.fabric.lockstep.gloo import Exchange, GlooWire, Messages, Traffic, guarded, packed

ALIGNED = 16
"""Messages lie one behind the other, and each begins at a multiple of this, where any dtype may."""


class NcclWire:
    """A wire over NCCL.

    Args:
        group: ProcessGroupNCCL of all ranks; every rank uses it from one thread, in one order.
        control: carries the sizes.
        timeout_s: timeout of each exchange.
    """

    def __init__(self, group: object, control: GlooWire, *, device: torch.device, timeout_s: float) -> None:
        self.group, self.control, self.device, self.timeout_s = group, control, device, timeout_s
        self.rank = control.rank
        self.traffic = Traffic()

    def open(self, tag: int, room: Mapping[int, int], *, exact: bool = False) -> Exchange:
        return _NcclExchange(self, tag, room, exact)


class _NcclExchange:
    def __init__(self, wire: NcclWire, tag: int, room: Mapping[int, int], exact: bool) -> None:
        self._wire, self._exact = wire, exact
        self._sizes = dict(room) if exact else {}
        self._ahead = None if exact else wire.control.open(tag, dict.fromkeys(room, 8), exact=True)
        self._work: Work | None = None
        self._into = torch.empty(0, dtype=torch.uint8, device=wire.device)
        self._kept: Tensor | None = None

    def send(self, messages: Messages) -> None:
        """Wait for the sizes of messages from peers, unless both ends know them, and begin the exchange."""
        bodies = {peer: packed(parts) for peer, parts in messages.items()}
        if self._ahead is not None:
            self._ahead.send({peer: (torch.tensor([len(body)]),) for peer, body in bodies.items()})
            self._sizes = {peer: int(size.view(torch.int64)) for peer, size in self._ahead.wait().items()}
        self._post({peer: body for peer, body in bodies.items() if len(body)})

    def wait(self) -> dict[int, Tensor]:
        if self._work is not None:
            self._until_done(self._work)
        found, at = {}, 0
        for peer in sorted(self._sizes):
            found[peer] = self._into[at : at + self._sizes[peer]]
            at += _room(self._sizes[peer])
        return {peer: message for peer, message in found.items() if len(message) or not self._exact}

    def _post(self, bodies: Mapping[int, Tensor]) -> None:
        """Begin the exchange, also without a message: after one that some ranks left out, the next one hangs."""
        wire = self._wire
        ranks = range(wire.group.size())  # type: ignore[attr-defined]
        for peer, body in bodies.items():
            wire.traffic.count(wire.control.scope(peer), len(body))
        out = [_room(len(bodies[peer])) if peer in bodies else 0 for peer in ranks]
        come = [_room(self._sizes.get(peer, 0)) for peer in ranks]
        self._kept = torch.zeros(sum(out), dtype=torch.uint8, device=wire.device)
        for peer, part in zip(ranks, self._kept.split_with_sizes(out), strict=True):
            if peer in bodies:
                part[: len(bodies[peer])] = bodies[peer]
        self._into = torch.empty(sum(come), dtype=torch.uint8, device=wire.device)
        with guarded("sending between GPUs"):
            self._work = wire.group.alltoall_base(self._into, self._kept, come, out)  # type: ignore[attr-defined]

    def _until_done(self, work: Work) -> None:
        """Wait on the host, which has a deadline: a kernel of NCCL has none."""
        until = time.monotonic() + self._wire.timeout_s
        with guarded("receiving between GPUs"):
            while not work.is_completed():
                if time.monotonic() > until:
                    self._wire.group.abort()  # type: ignore[attr-defined]
                    raise LockstepBroken("An exchange between GPUs took too long.", hint="All ranks restart.")
                time.sleep(0)
            work.wait()


def nccl_group(store: Store, rank: int, size: int, device: torch.device, timeout_s: float) -> object:
    """Make and connect a ProcessGroupNCCL by ``store`` alone. Raises LockstepBroken."""
    from torch.distributed import ProcessGroupNCCL

    options = ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=2 * timeout_s)  # later than our own deadline: NCCL's ends the process
    with guarded("connecting the GPUs"):
        group: object = ProcessGroupNCCL(store, rank, size, options)
    _connect(group, device, timeout_s)
    return group


def _connect(group: object, device: torch.device, timeout_s: float) -> None:
    """Connect all ranks at once: NCCL connects in the first exchange, where a rank without rows would be missing."""
    problems: list[RuntimeError] = []
    done = threading.Event()

    def run() -> None:
        try:
            group.allreduce([torch.zeros(1, device=device)]).wait()  # type: ignore[attr-defined]
            torch.cuda.synchronize(device)
        except RuntimeError as error:
            problems.append(error)
        finally:
            done.set()

    threading.Thread(target=run, name="connecting the GPUs", daemon=True).start()
    if not done.wait(timeout_s) or problems:
        reason = str(problems[0]).splitlines()[0] if problems else f"not within {timeout_s:g} s"
        raise LockstepBroken(
            f"The GPUs of the ranks did not connect: {reason}.", hint="Each rank needs a GPU of its own."
        )


def _room(size: int) -> int:
    return -(-size // ALIGNED) * ALIGNED
