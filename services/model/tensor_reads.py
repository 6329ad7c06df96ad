"""Reads tensors of a checkpoint from their files straight into their places, with several threads.

In: places, which are tensors of the final layout, dtype and device, and what belongs there. Out: filled places. Bytes
that a host's tensor holds as the file does are read into it; others go through a few staging buffers of each thread,
from which a GPU copies by itself while the thread reads on.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path
from queue import SimpleQueue
from typing import Protocol

import torch
from torch import Tensor

from services.errors import CheckpointError
from services.model.checkpoint import Checkpoint
from services.model.header import TensorEntry
from services.model.host_memory import release_pinned
from services.model.stored_tensors import DTYPES, read_bytes
from services.model.transfer import Awaited, Mark

PIECE_BYTES = 8 << 20
"""Most bytes of one read: long enough for any disk, short enough for all threads to share a large tensor."""
BUFFERS = 2
"""Staging buffers of a thread: one is read into while the other is copied from."""
_MIN_THREADS, _MAX_THREADS = 4, 16


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where the tensor called ``name`` goes: ``target`` is contiguous, and has the tensor's shape."""

    name: str
    target: Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class _Piece:
    """Bytes of a file from ``begin`` on, and the part of a place that they fill."""

    name: str
    entry: TensorEntry
    begin: int
    nbytes: int
    part: Tensor

    @property
    def stored(self) -> torch.dtype:
        return DTYPES[self.entry.dtype]

    def read(self, descriptor: int, into: Tensor) -> None:
        """Read its bytes into ``into``, a contiguous tensor in the host's memory."""
        read_bytes(descriptor, into, self.begin, name=self.name, file=self.entry.file)


class Copies(Protocol):
    """Copies staged values to where they belong, in order."""

    def copy(self, target: Tensor, staged: Tensor) -> Awaited:
        """Copy, converting to ``target``'s dtype. Who waits for the result may change ``staged`` afterwards."""

    def finish(self) -> None:
        """Wait for all copies."""


class HostCopies:
    """Copies within the host's memory, at once."""

    def copy(self, target: Tensor, staged: Tensor) -> Awaited:
        target.copy_(staged)
        return Mark(target.device)

    def finish(self) -> None:
        pass


class GpuCopies:
    """Copies from pinned memory to a GPU on a stream of its own, which no other work waits for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._stream.wait_stream(torch.cuda.current_stream(device))  # the places may be memory that is still in use

    def copy(self, target: Tensor, staged: Tensor) -> Awaited:
        with torch.cuda.stream(self._stream):
            same = staged.dtype == target.dtype  # others are converted on the GPU: the host would wait for itself
            target.copy_(staged if same else staged.to(self._device, non_blocking=True), non_blocking=True)
            return Mark(self._device)

    def finish(self) -> None:
        self._stream.synchronize()


class Lane:
    """One thread's way from the files to the places."""

    def __init__(self, copies: Copies, *, pinned: bool) -> None:
        self._copies, self._pinned = copies, pinned
        self._marks: list[Awaited | None] = [None] * BUFFERS
        self._turns = cycle(range(BUFFERS))
        self._buffers: list[Tensor] = []

    def read(self, descriptor: int, piece: _Piece) -> int:
        """Fill the piece's part, or begin to. Returns the bytes read. Raises CheckpointError."""
        if piece.part.device.type == "cpu" and piece.stored == piece.part.dtype:
            piece.read(descriptor, piece.part)
            return piece.nbytes
        turn = next(self._turns)
        if (mark := self._marks[turn]) is not None:
            mark.wait()
        staged = self._buffer(turn)[: piece.nbytes].view(piece.stored)
        piece.read(descriptor, staged)
        self._marks[turn] = self._copies.copy(piece.part, staged)
        if piece.part.dtype == torch.float16 and piece.stored != torch.float16:
            self._copies.finish()
            refuse_overflow(piece.name, piece.entry.file, piece.part)
        return piece.nbytes

    def finish(self) -> None:
        """Wait until all parts are filled, and drop the buffers."""
        self._copies.finish()
        self._buffers.clear()

    def _buffer(self, turn: int) -> Tensor:
        while len(self._buffers) <= turn:
            self._buffers.append(torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=self._pinned))
        return self._buffers[turn]


def refuse_overflow(name: str, file: Path, part: Tensor) -> None:
    """Raise CheckpointError where the conversion to float16 made values of ``part`` infinite."""
    if part.dtype == torch.float16 and not part.isfinite().all():
        raise CheckpointError(
            f'{file}: "{name}" has values beyond float16\'s range.',
            hint="Serve it with --dtype bfloat16 or float32.",
        )


def read_tensors(
    checkpoint: Checkpoint,
    places: Iterable[Place],
    device: torch.device,
    advance: Callable[[int], None],
    *,
    threads: int | None = None,
) -> None:
    """Fill ``places``, which are on ``device``.

    Args:
        advance: called by this thread with the bytes that were read; what it raises ends the reading.

    Raises:
        CheckpointError: a file is damaged, was truncated or has changed, or values do not fit the dtype.
    """
    pieces = [piece for place in places for piece in _pieces(checkpoint.entry(place.name), place)]
    pieces.sort(key=lambda piece: (piece.entry.file, piece.begin))
    files = {file: checkpoint.descriptor(file) for file in {piece.entry.file for piece in pieces}}
    lanes: SimpleQueue[Lane] = SimpleQueue()
    made = [_lane(device) for _ in range(threads or reading_threads())]
    for lane in made:
        lanes.put(lane)

    def read(piece: _Piece) -> int:
        lane = lanes.get()
        try:
            with torch.inference_mode():  # of this thread; places made in that mode may be written to only in it
                return lane.read(files[piece.entry.file], piece)
        finally:
            lanes.put(lane)

    with ExitStack() as stack:
        if device.type == "cuda":
            stack.callback(release_pinned)  # the buffers of lanes that have ended
            stack.callback(torch.cuda.empty_cache)  # what the lanes' streams converted in would stay theirs
        for lane in made:
            stack.callback(lane.finish)
        pool = ThreadPoolExecutor(len(made), "weights")
        stack.callback(pool.shutdown, cancel_futures=True)
        for nbytes in pool.map(read, pieces):
            advance(nbytes)
    checkpoint.check_unchanged(files)


def reading_threads() -> int:
    """Return how many threads read: some even on few cores, since a read waits for the disk."""
    return max(_MIN_THREADS, min(_MAX_THREADS, len(os.sched_getaffinity(0))))


def _lane(device: torch.device) -> Lane:
    on_gpu = device.type == "cuda"
    return Lane(GpuCopies(device) if on_gpu else HostCopies(), pinned=on_gpu)


def _pieces(entry: TensorEntry, place: Place) -> Iterator[_Piece]:
    assert place.target.is_contiguous(), place.name
    assert place.target.shape == entry.shape, place.name
    size = DTYPES[entry.dtype].itemsize
    flat, step = place.target.view(-1), PIECE_BYTES // size
    for first in range(0, flat.numel(), step):
        part = flat[first : first + step]
        yield _Piece(
            name=place.name, entry=entry, begin=entry.begin + first * size, nbytes=part.numel() * size, part=part
        )
