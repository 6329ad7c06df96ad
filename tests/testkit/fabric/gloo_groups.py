"""Process groups over gloo: they show on CPUs what :class:`services.fabric.nccl.process_groups.NcclGroups` does."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from services.errors import SeatLost
from services.fabric.nccl.pair_store import PairStore
from services.fabric.nccl.process_groups import Broken, Transfer

_MAKING = timedelta(seconds=60)
"""Timeout for connecting; transfers have deadlines of their own."""
_MAX_WAIT_S = 24 * 3600.0


class GlooGroups:
    """Groups over gloo, between CPUs: a :class:`services.fabric.nccl.process_groups.Groups`."""

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
        """Do nothing: the caller drops the group, which closes its sockets and so ends what waits at either end."""


class _GlooTransfer:
    def __init__(self, work: Any, rows: Tensor) -> None:
        self._work, self._rows = work, rows

    def finish(self, until: float, broken: Broken) -> None:  # noqa: ARG002  gloo's own sockets show it
        left_s = min(max(0.001, until - time.monotonic()), _MAX_WAIT_S)
        try:
            self._work.wait(timedelta(seconds=left_s))
        except RuntimeError as error:
            raise SeatLost(f"The gloo lane broke: {str(error).splitlines()[0][:200]}") from error
