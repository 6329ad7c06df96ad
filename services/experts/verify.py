"""Weights that another worker gave, held against the checkpoint's digests while more of them come.

Legend: E experts of a layer, in the order of the group.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Self

import torch
from torch import Tensor

from services.errors import WeightsMismatch
from services.fabric.tcp.frames import DTYPES, bytes_of
from services.model.digests import Digests, hashing_threads

_CHUNK = 16 << 20
"""Bytes that a thread brings from a GPU at a time."""


class Verifier(AbstractContextManager["Verifier"]):
    """For one thread; it has others that hash.

    Args:
        experts: layer -> their ids.
    """

    def __init__(self, digests: Digests, experts: Mapping[int, Sequence[int]]) -> None:
        self._digests, self._experts, self._dtype = digests, experts, DTYPES[digests.dtype]
        self._pool = ThreadPoolExecutor(hashing_threads(), thread_name_prefix="verify weights")
        self._pending: deque[Future[None]] = deque()
        self._local = threading.local()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pool.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def take(self, layer: int, name: str, matrices_E: Tensor) -> None:
        """Begin with a tensor that has come, and does not change any more.

        Raises:
            WeightsMismatch: one that came before is not the checkpoint's.
        """
        for expert, matrix in zip(self._experts[layer], matrices_E, strict=True):
            self._pending.append(self._pool.submit(self._check, layer, name, expert, matrix))
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait for all. Raises WeightsMismatch as :meth:`take`."""
        while self._pending:
            self._pending.popleft().result()

    def _check(self, layer: int, name: str, expert: int, matrix: Tensor) -> None:
        stored = self._as_stored(matrix)
        if stored is None or self._digest(stored) != self._digests.of(layer, name, expert):
            raise WeightsMismatch(f"{name} of expert {expert} in layer {layer} is not what the checkpoint holds.")

    def _as_stored(self, matrix: Tensor) -> Tensor | None:
        """In the checkpoint's type; None where it has bits that none of that type has."""
        if matrix.dtype == self._dtype:
            return matrix
        stored = matrix.to(self._dtype)
        again = stored.to(matrix.dtype)
        return stored if torch.equal(again.view(torch.uint8), matrix.view(torch.uint8)) else None

    def _digest(self, matrix: Tensor) -> bytes:
        if matrix.device.type == "cpu":
            return hashlib.sha256(bytes_of(matrix)).digest()
        digest, data = hashlib.sha256(), matrix.view(-1).view(torch.uint8)
        with torch.cuda.stream(self._stream(matrix.device)):
            for chunk in torch.split(data, _CHUNK):
                digest.update(bytes_of(self._brought(chunk)))
        return digest.digest()

    def _brought(self, chunk: Tensor) -> Tensor:
        """In this thread's own memory, until the next one."""
        if not hasattr(self._local, "staging"):
            self._local.staging = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True)
        staging: Tensor = self._local.staging[: len(chunk)]
        staging.copy_(chunk, non_blocking=True)
        torch.cuda.current_stream(chunk.device).synchronize()
        return staging

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """Of this thread: what it brings does not wait for what others do on the device."""
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._local.stream
        return stream
