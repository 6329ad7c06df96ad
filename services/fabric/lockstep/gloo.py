"""Messages between the ranks in lock-step, as :mod:`services.fabric.lockstep.rows` packs them.

A wire is one rank's end. Every exchange has a tag, and both ends of a pair open it. Every wait has a deadline.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Protocol

import torch
from torch import Tensor
from torch.distributed import ProcessGroupGloo, Work
from torch.distributed.distributed_c10d import Store

from services.errors import LockstepBroken

Messages = Mapping[int, Sequence[Tensor]]
"""Peer -> tensors whose bytes make one message."""
HEADER_BYTES = 8


@dataclass(slots=True)
class Traffic:
    """Counts messages and bytes sent since the start, inside the node and across nodes, without control traffic."""

    messages: dict[str, int] = field(default_factory=lambda: {"node": 0, "across": 0})
    bytes: dict[str, int] = field(default_factory=lambda: {"node": 0, "across": 0})

    def count(self, scope: str, nbytes: int) -> None:
        """Count one message; ``scope`` is "node" or "across"."""
        self.messages[scope] += 1
        self.bytes[scope] += nbytes


class Group(Protocol):
    """The methods of torch's process groups that a wire uses: point-to-point messages, and sums in place."""

    def rank(self) -> int:
        """Return this rank."""

    def send(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Begin to send one tensor to ``peer``."""

    def recv(self, tensors: list[Tensor], peer: int, tag: int) -> Work:
        """Begin to receive one tensor from ``peer``."""

    def allreduce(self, tensors: list[Tensor]) -> Work:
        """Begin to sum one tensor over all ranks, in place."""


class Exchange(Protocol):
    """Messages of one tag: call :meth:`send` once, then :meth:`wait` once."""

    def send(self, messages: Messages) -> None:
        """Start to send to the peers that open the exchange with room for this rank."""

    def wait(self) -> dict[int, Tensor]:
        """Return peer -> the bytes that came from it, uint8.

        Raises:
            LockstepBroken: a peer is gone, or nothing came in time.
        """


class Wire(Protocol):
    """One rank's end of the lock-step group."""

    rank: int
    traffic: Traffic

    def open(self, tag: int, room: Mapping[int, int], *, exact: bool = False) -> Exchange:
        """Open an exchange that receives from the peers in ``room``, from each at most so many bytes.

        Args:
            exact: both ends know the sizes; there is no message of size 0.
        """


class GlooWire:
    """A wire over TCP, from and into memory of the CPU.

    A message is received as soon as it comes: its buffer holds the largest message, which begins with its length.

    Args:
        group: process group of all ranks.
        near: the ranks on this rank's node.
        timeout_s: timeout of each wait.
    """

    def __init__(self, group: Group, *, near: Sequence[int], timeout_s: float) -> None:
        self._group = group
        self._near = frozenset(near)
        self._timeout_s = timeout_s
        self.rank: int = group.rank()
        self.traffic = Traffic()

    def open(self, tag: int, room: Mapping[int, int], *, exact: bool = False) -> Exchange:
        return _GlooExchange(self, tag, room, exact)

    def scope(self, peer: int) -> str:
        """Return the scope of traffic with ``peer``: "node" or "across"."""
        return "node" if peer in self._near else "across"

    def close(self) -> None:
        """End the group and wait for its threads.

        One of them may still free tensors of an all-reduce. If the interpreter ended meanwhile, that thread would ask
        for the GIL in vain, which aborts the process.
        """
        del self._group  # the only reference: torch ends the group, without the GIL

    def agree(self, values: Sequence[int]) -> list[int]:
        """Return the sum over all ranks of each of ``values``, by one small all-reduce. Raises LockstepBroken."""
        sums = torch.tensor(values, dtype=torch.int64)
        with guarded("agreeing on the next step"):
            self._group.allreduce([sums]).wait(timedelta(seconds=self._timeout_s))
        return list(sums.tolist())

    def post(self, peer: int, tag: int, message: Tensor) -> Work:
        """Begin to send ``message``, uint8, which must not change until it is sent."""
        self.traffic.count(self.scope(peer), message.nbytes)
        return self._group.send([message], peer, tag)

    def expect(self, peer: int, tag: int, into: Tensor) -> Work:
        """Begin to receive a message into the buffer ``into``, uint8."""
        return self._group.recv([into], peer, tag)

    def finish(self, works: Mapping[int, Work], what: str) -> None:
        """Wait for the work of each peer; ``what`` names it in errors. Raises LockstepBroken."""
        until = time.monotonic() + self._timeout_s
        for peer, work in works.items():
            with guarded(f"{what} rank {peer}"):
                work.wait(timedelta(seconds=max(until - time.monotonic(), 0.001)))


class _GlooExchange:
    def __init__(self, wire: GlooWire, tag: int, room: Mapping[int, int], exact: bool) -> None:
        self._wire, self._tag, self._exact = wire, tag, exact
        extra = 0 if exact else HEADER_BYTES
        self._into = {peer: torch.empty(size + extra, dtype=torch.uint8) for peer, size in room.items() if size + extra}
        self._sent: dict[int, Work] = {}
        self._kept: list[Tensor] = []
        with guarded("receiving"):
            self._received = {peer: wire.expect(peer, tag, into) for peer, into in self._into.items()}

    def send(self, messages: Messages) -> None:
        for peer, parts in messages.items():
            message = packed(parts) if self._exact else packed((_length(parts), *parts))
            if len(message):
                self._kept.append(message)  # the group sends from it until it is done
                with guarded(f"sending to rank {peer}"):
                    self._sent[peer] = self._wire.post(peer, self._tag, message)

    def wait(self) -> dict[int, Tensor]:
        self._wire.finish(self._received, "receiving from")
        self._wire.finish(self._sent, "sending to")
        return {peer: into if self._exact else _body(into) for peer, into in self._into.items()}


def gloo_group(store: Store, rank: int, size: int, *, host: str, timeout_s: float) -> Group:
    """Make a process group by ``store`` alone, without a global process group.

    Args:
        host: address of this rank that the others reach.

    Raises:
        LockstepBroken: the ranks did not find one another in time.
    """
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=timeout_s)
    with guarded("connecting the ranks"):
        group: Group = ProcessGroupGloo(store, rank, size, options)  # type: ignore[assignment]  # its stub is empty
        return group


@contextmanager
def guarded(what: str) -> Iterator[None]:
    """Raise errors of torch.distributed, which all are RuntimeErrors, as LockstepBroken; ``what`` is done inside."""
    try:
        yield
    except RuntimeError as error:
        first, *_ = str(error).splitlines() or [type(error).__name__]
        reason = first.partition("] ")[2] or first
        raise LockstepBroken(
            f"The lock-step group failed while {what}: {reason}", hint="All ranks restart; requests are kept."
        ) from error


def packed(parts: Sequence[Tensor]) -> Tensor:
    """Return the bytes of ``parts`` one behind the other, uint8, in memory of their own."""
    return torch.cat([part.contiguous().view(-1).view(torch.uint8) for part in parts])


def _length(parts: Sequence[Tensor]) -> Tensor:
    return torch.tensor([sum(part.nbytes for part in parts)], dtype=torch.int64)


def _body(message: Tensor) -> Tensor:
    length = int(message[:HEADER_BYTES].view(torch.int64))
    return message[HEADER_BYTES : HEADER_BYTES + length]
