"""Process groups of two over which rows travel: NCCL between GPUs, gloo between CPUs. One group per direction.

Two groups, because a group runs its operations one after the other: rows that go and rows that come on one group would
have to be issued in the same order at both ends, which nobody can promise.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from services.errors import ConfigError, SeatLost
from services.fabric.nccl.pair_store import PairStore

Broken = Callable[[], bool]
"""Whether the connection beside a lane has ended."""

_NEVER = timedelta(days=1)
"""torch's own deadline. It would end the process; ours end a wait."""
_MAKING = timedelta(seconds=60)
"""Gloo's, for connecting: transfers are waited for with deadlines of their own."""
_SPIN_S, _NAP_S, _LOOK_S = 3e-4, 5e-5, 1e-3
_GRACE_S = 0.02
"""What a peer sent before it ended the connection may still be on its way."""
_ENVIRONMENT = {
    "NCCL_LAUNCH_ORDER_IMPLICIT": "1",  # several communicators on a device launch in the order in which they are called
    "NCCL_LAUNCH_RACE_FATAL": "0",  # only the first use of a new pair races: calls have a lock (see Lane)
    "NCCL_NVLS_ENABLE": "0",  # multicast is of no use to two ranks
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",  # a peer's death concerns its pair, not this process
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}


class Transfer(Protocol):
    """A tensor on its way. Whoever holds this keeps its memory."""

    def finish(self, until: float, broken: Broken) -> None:
        """Return once it is through.

        Raises:
            SeatLost: it is not by the monotonic time ``until``, or the pair broke.
        """
        ...


class Groups(Protocol):
    """Makes and uses the groups of one device."""

    name: str
    device: torch.device

    def identity(self) -> str:
        """Of the device: two ends on the same one cannot have a lane."""
        ...

    def make(self, store: PairStore, rank: int, host: str) -> Any:
        """A group of two; ``host`` is an address of this machine that the other end reaches. Blocks until both are."""
        ...

    def stream(self) -> Any:
        """Work of one thread of one lane."""
        ...

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        """What is computed or allocated inside belongs to ``stream``."""
        ...

    def mark(self) -> Any:
        """A moment of the caller's work on the device, for :meth:`reach`."""
        ...

    def reach(self, mark: Any) -> None:
        """Wait until this device's own work has come to ``mark``."""
        ...

    def send(self, group: Any, rank: int, rows: Tensor) -> Transfer: ...

    def receive(self, group: Any, rank: int, into: Tensor) -> Transfer: ...

    def abort(self, group: Any) -> None:
        """End the group, whatever the other end does. Blocks until the device is done with all that runs there."""
        ...


class GlooGroups:
    """Between CPUs: shows on any machine what :class:`NcclGroups` does between GPUs."""

    name = "gloo"

    def __init__(self) -> None:
        self.device = torch.device("cpu")

    def identity(self) -> str:
        return ""

    def make(self, store: PairStore, rank: int, host: str) -> Any:
        options: Any = vars(dist.ProcessGroupGloo)["_Options"]()
        options._devices = [dist.ProcessGroupGloo.create_device(hostname=host)]
        options._timeout, options._threads = _MAKING, 1
        return dist.ProcessGroupGloo(store, rank, 2, options)

    def stream(self) -> None:
        return None

    def on(self, stream: None) -> AbstractContextManager[Any]:  # noqa: ARG002
        return nullcontext()

    def mark(self) -> None:
        return None

    def reach(self, mark: None) -> None:
        pass

    def send(self, group: Any, rank: int, rows: Tensor) -> Transfer:
        return _GlooTransfer(group.send([rows], rank, 0), rows)

    def receive(self, group: Any, rank: int, into: Tensor) -> Transfer:
        return _GlooTransfer(group.recv([into], rank, 0), into)

    def abort(self, group: Any) -> None:
        """The caller drops the group, which closes its sockets and so ends what waits at either end."""


class _GlooTransfer:
    def __init__(self, work: Any, rows: Tensor) -> None:
        self._work, self._rows = work, rows

    def finish(self, until: float, broken: Broken) -> None:  # noqa: ARG002  gloo's own sockets tell
        left_s = min(max(0.001, until - time.monotonic()), _NEVER.total_seconds())
        try:
            self._work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            raise SeatLost(f"The gloo lane broke: {str(error).splitlines()[0][:200]}") from error


class NcclGroups:
    """Between GPUs.

    Args:
        device: this process's.
        max_ctas: thread blocks that one transfer may take from the kernels that compute.
    """

    name = "nccl"

    def __init__(self, device: torch.device, *, max_ctas: int = 16) -> None:
        self.device = device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
        self._max_ctas = max_ctas
        for name, value in _ENVIRONMENT.items():  # for NCCL and torch, which read it when the first group is made
            os.environ.setdefault(name, value)

    def identity(self) -> str:
        return str(torch.cuda.get_device_properties(self.device).uuid)

    def make(self, store: PairStore, rank: int, host: str) -> Any:  # noqa: ARG002  NCCL finds its own way
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = _NEVER
        options.config.max_ctas = self._max_ctas
        options.global_ranks_in_group = [0, 1]
        with torch.cuda.device(self.device):
            return dist.ProcessGroupNCCL(store, rank, 2, options)

    def stream(self) -> torch.cuda.Stream:
        return torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def on(self, stream: torch.cuda.Stream) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self.device))
        return event

    def reach(self, mark: torch.cuda.Event) -> None:
        while not mark.query():  # type: ignore[no-untyped-call]
            time.sleep(0)

    def send(self, group: Any, rank: int, rows: Tensor) -> Transfer:
        return self._transfer(group.send([rows], rank, 0), rows)

    def receive(self, group: Any, rank: int, into: Tensor) -> Transfer:
        return self._transfer(group.recv([into], rank, 0), into)

    def abort(self, group: Any) -> None:
        group.abort()

    def _transfer(self, work: Any, rows: Tensor) -> Transfer:
        """An event of our own: torch calls work completed too where it failed."""
        work.wait()  # the stream does, not this thread
        return _NcclTransfer(self.mark(), rows)


class _NcclTransfer:
    def __init__(self, through: torch.cuda.Event, rows: Tensor) -> None:
        self._through, self._rows = through, rows

    def finish(self, until: float, broken: Broken) -> None:
        spin_until = look_at = time.monotonic() + _SPIN_S
        while not self._through.query():  # type: ignore[no-untyped-call]
            now = time.monotonic()
            if now >= look_at:
                look_at = now + _LOOK_S
                if broken():
                    until = min(until, now + _GRACE_S)
                if now >= until:
                    raise SeatLost("The other end of an NCCL lane is gone, or took too long.")
            time.sleep(0 if now < spin_until else _NAP_S)


def groups_for(choice: str, device: torch.device) -> Groups | None:
    """How rows are to travel beside the connection: ``auto``, ``tcp`` (inside it), ``nccl`` or ``gloo``.

    Raises:
        ConfigError: this machine cannot do what was chosen.
    """
    on_gpu = device.type == "cuda" and dist.is_available() and dist.is_nccl_available()
    if choice == "nccl" and not on_gpu:
        raise ConfigError("--fabric-lane nccl needs a GPU and a torch with NCCL.", hint="Choose auto or tcp.")
    if choice == "gloo" and (device.type != "cpu" or not dist.is_available() or not dist.is_gloo_available()):
        raise ConfigError("--fabric-lane gloo needs --device cpu and a torch with gloo.", hint="Choose auto or tcp.")
    if choice == "gloo":
        return GlooGroups()
    return NcclGroups(device) if on_gpu and choice in ("auto", "nccl") else None
