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

from moe_kernels import Weight
from services.errors import WeightsMismatch
from services.fabric.tcp.frames import DTYPES, bytes_of
from services.model.digests import Digests, hashing_threads
from services.model.experts import tensors_of

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

    def take(self, layer: int, name: str, weight: Weight) -> None:
        """Begin to check a weight, which must not change any more.

        Raises:
            WeightsMismatch: an earlier weight is not the checkpoint's.
        """
        parts = [tensor for _, tensor in sorted(tensors_of(name, weight).items())]
        for index, expert in enumerate(self._experts[layer]):
            matrix = [part[index] for part in parts]
            self._pending.append(self._pool.submit(self._check, layer, name, expert, matrix))
        while self._pending and self._pending[0].done():
            self._pending.popleft().result()

    def finish(self) -> None:
        """Wait until all tensors are checked. Raises WeightsMismatch."""
        while self._pending:
            self._pending.popleft().result()

    def _check(self, layer: int, name: str, expert: int, parts: Sequence[Tensor]) -> None:
        stored = parts if len(parts) > 1 else self._as_stored(*parts)
        if stored is None or self._digest(stored) != self._digests.of(layer, name, expert):
            raise WeightsMismatch(f"{name} of expert {expert} in layer {layer} is not what the checkpoint holds.")

    def _as_stored(self, matrix: Tensor) -> Sequence[Tensor] | None:
        """Convert to the checkpoint's dtype; None where that loses bits, so that the matrix cannot come from there."""
        if matrix.dtype == self._dtype:
            return [matrix]
        stored = matrix.to(self._dtype)
        again = stored.to(matrix.dtype)
        return [stored] if torch.equal(again.view(torch.uint8), matrix.view(torch.uint8)) else None

    def _digest(self, parts: Sequence[Tensor]) -> bytes:
        """Return the digest of a matrix: of a quantised one's parts by name, one after the other."""
        digest = hashlib.sha256()
        for part in parts:
            self._add(digest, part)
        return digest.digest()

    def _add(self, digest: hashlib._Hash, part: Tensor) -> None:
        if part.device.type == "cpu":
            digest.update(bytes_of(part))
            return
        with torch.cuda.stream(self._stream(part.device)):
            for chunk in torch.split(part.view(-1).view(torch.uint8), _CHUNK):
                digest.update(bytes_of(self._brought(chunk)))

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
