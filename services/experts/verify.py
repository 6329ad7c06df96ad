"""Checks weights that another worker sent against the checkpoint's digests, while more of them come.

Legend: E experts of a layer, in the order of the group.
"""

from __future__ import annotations

import hashlib
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager

import torch
from torch import Tensor

from services.errors import WeightsMismatch
from services.fabric.tcp.frames import DTYPES, bytes_of
from services.model.digests import Digests, hashing_threads

_CHUNK = 16 << 20
"""Bytes that a thread copies from a GPU at a time."""


class Verifier(AbstractContextManager["Verifier"]):
    """Hashes tensors in threads of its own, which end with the context. Not thread-safe.

    Args:
        experts: layer -> ids of the experts whose tensors come.
    """

    def __init__(self, digests: Digests, experts: Mapping[int, Sequence[int]]) -> None:
        self._digests, self._experts, self._dtype = digests, experts, DTYPES[digests.dtype]
        self._pool = ThreadPoolExecutor(hashing_threads(), thread_name_prefix="verify weights")
        self._pending: deque[Future[None]] = deque()
        self._local = threading.local()

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def take(self, layer: int, name: str, matrices_E: Tensor) -> None:
        """Begin to check a tensor, which must not change any more.

        Raises:
            WeightsMismatch: an earlier tensor is not the checkpoint's.
        """
        for expert, matrix in zip(self._experts[layer], matrices_E, strict=True):
            self._pending.append(self._pool.submit(self._check, layer, name, expert, matrix))
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait until all tensors are checked. Raises WeightsMismatch."""
        while self._pending:
            self._pending.popleft().result()

    def _check(self, layer: int, name: str, expert: int, matrix: Tensor) -> None:
        stored = self._as_stored(matrix)
        if stored is None or self._digest(stored) != self._digests.of(layer, name, expert):
            raise WeightsMismatch(f"{name} of expert {expert} in layer {layer} is not what the checkpoint holds.")

    def _as_stored(self, matrix: Tensor) -> Tensor | None:
        """Convert to the checkpoint's dtype; None where that loses bits, so that the matrix cannot come from there."""
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
        """Copy ``chunk`` into this thread's memory, where it stays until the next call."""
        if not hasattr(self._local, "staging"):
            self._local.staging = torch.empty(_CHUNK, dtype=torch.uint8, pin_memory=True)
        staging: Tensor = self._local.staging[: len(chunk)]
        staging.copy_(chunk, non_blocking=True)
        torch.cuda.current_stream(chunk.device).synchronize()
        return staging

    def _stream(self, device: torch.device) -> torch.cuda.Stream:
        """Return this thread's stream, on which copies do not wait for other work on the device."""
        if not hasattr(self._local, "stream"):
            self._local.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        stream: torch.cuda.Stream = self._local.stream
        return stream
