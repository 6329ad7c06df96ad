"""SHA-256 digests of a checkpoint's experts, in a file next to it, to check weights from other workers.

`expertmesh digests` writes the file; workers that join read it. Torch-free. A digest covers the bytes of an expert's
matrix as they are stored: ``gate_up`` (the gate's rows, then those of the up projection) or ``down``. Of a quantised
checkpoint it covers the weights as they are loaded in the checkpoint's own dtype, which needs torch.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Annotated

import msgspec

from services.errors import CheckpointError, WorkerExtraMissing
from services.model.checkpoint import Checkpoint
from services.model.load_spec import load_spec
from services.model.names import TensorNames
from services.model.progress import NoProgress, Progress
from services.model.spec import ModelSpec

FILE = ".expertmesh-digests"
_FORMAT = 1
_CHUNK = 4 << 20
_MAX_THREADS = 16
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_HOLDS = {"float32": ("float32", "bfloat16", "float16")}
"""Serving dtype -> stored dtypes of which it holds every value, so that digests of the stored bytes can check it."""
_HOW = "Workers that join will read weights from disk, not from peers; `expertmesh digests FOLDER` writes the file."

Names = tuple[str, ...]
"""Of the tensors that make up a matrix."""
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

log = logging.getLogger(__name__)


class LayerDigests(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of one layer, in order of the experts."""

    gate_up: tuple[Digest, ...]
    down: tuple[Digest, ...]


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """The file's contents. ``fingerprint`` is that of the checkpoint, ``dtype`` that of its stored experts."""

    format: int
    fingerprint: str
    dtype: str
    layers: dict[int, LayerDigests]

    def of(self, layer: int, name: str, expert: int) -> bytes:
        """Return the digest of the matrix ``name``: ``gate_up`` or ``down``."""
        digests: tuple[bytes, ...] = getattr(self.layers[layer], name)
        return digests[expert]


def read_digests(model_dir: Path, spec: ModelSpec, dtype: str) -> Digests | None:
    """Return the digests of ``spec``'s experts for serving in ``dtype``; None, and a log line, where there are none."""
    file = model_dir / FILE
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Digests)
    except FileNotFoundError:
        log.info("%s does not exist. %s", file, _HOW)
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s cannot be read: %s. %s", file, error, _HOW)
        return None
    if not _fits(found, spec, dtype):
        log.warning("%s does not match these experts or the dtype %s. %s", file, dtype, _HOW)
        return None
    return found


def write_digests(model_dir: Path, progress: Progress | None = None) -> None:
    """Read all experts' weights, and write their digests into the folder. ``progress`` gets the bytes of the files.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, has no experts, or stores them in several types.
        OSError: the file cannot be written.
    """
    spec = load_spec(model_dir)
    with Checkpoint(model_dir, spec) as checkpoint:
        digests = _digests(checkpoint, spec, progress or NoProgress())
    draft = model_dir / f"{FILE}.draft"
    draft.write_bytes(msgspec.json.encode(digests))
    os.replace(draft, model_dir / FILE)
    log.info(
        "wrote %s: digests of %d experts in each of %d layers", model_dir / FILE, spec.num_experts, len(digests.layers)
    )


def hashing_threads() -> int:
    """Return one thread per core, up to what a disk or a lane has bytes for: hashing releases Python's lock."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _fits(found: Digests, spec: ModelSpec, dtype: str) -> bool:
    if (found.format, found.fingerprint) != (_FORMAT, spec.fingerprint):
        return False
    if found.dtype not in (_HOLDS.get(dtype, (dtype,)) if spec.quantisation is None else (dtype,)):
        return False
    counts = {len(by_expert) for layer in found.layers.values() for by_expert in (layer.gate_up, layer.down)}
    return tuple(sorted(found.layers)) == spec.moe_layers and counts == {spec.num_experts}


def _digests(checkpoint: Checkpoint, spec: ModelSpec, progress: Progress) -> Digests:
    if not spec.moe_layers:
        raise CheckpointError("The checkpoint has no experts, so it can have no digests.")
    names = TensorNames(spec.family)
    ffns = [names.expert(layer, expert) for layer in spec.moe_layers for expert in range(spec.num_experts)]
    matrices = [parts for ffn in ffns for parts in ((ffn.gate, ffn.up), (ffn.down,))]
    progress.begin("experts' digests", checkpoint.nbytes(chain.from_iterable(matrices)))
    found = []
    with _hashing(checkpoint, spec, matrices) as (dtype, digest):
        for parts, one in zip(matrices, _each(digest, matrices), strict=True):
            found.append(one)
            progress.advance(checkpoint.nbytes(parts))
    size = 2 * spec.num_experts
    by_layer = {layer: _by_matrix(found[at * size : (at + 1) * size]) for at, layer in enumerate(spec.moe_layers)}
    return Digests(format=_FORMAT, fingerprint=spec.fingerprint, dtype=dtype, layers=by_layer)


@contextmanager
def _hashing(
    checkpoint: Checkpoint, spec: ModelSpec, matrices: Iterable[Names]
) -> Iterator[tuple[str, Callable[[Names], bytes]]]:
    """Return the type whose bytes digests cover, and how the digest of a matrix is made."""
    if spec.quantisation is None:
        yield _stored_type(checkpoint, matrices), partial(_digest, checkpoint)
        return
    try:
        from services.model.dequantised.digest import digest_of_loaded, single_threads
    except ImportError as error:
        raise CheckpointError(
            f"Digests of a quantised checkpoint need torch. {WorkerExtraMissing('torch').message}"
        ) from error
    with single_threads():
        yield spec.dtype, partial(digest_of_loaded, checkpoint.pieces, spec.dtype)


def _each(digest: Callable[[Names], bytes], matrices: Iterable[Names]) -> Iterator[bytes]:
    """Yield digests in order, made by several threads. Once nobody asks for more, no other is begun."""
    with ThreadPoolExecutor(hashing_threads(), "digests") as pool:
        yield from pool.map(digest, matrices)


def _stored_type(checkpoint: Checkpoint, matrices: Iterable[Names]) -> str:
    types = {checkpoint.entry(name).dtype for name in chain.from_iterable(matrices)}
    if len(types) != 1:
        stored = ", ".join(sorted(types))
        raise CheckpointError(f"The checkpoint stores experts in {stored}, so it can have no digests.")
    return _DTYPES[types.pop()]


def _by_matrix(digests: list[bytes]) -> LayerDigests:
    """Sort ``digests``, which are of ``gate_up`` and ``down`` alternately."""
    return LayerDigests(gate_up=tuple(digests[::2]), down=tuple(digests[1::2]))


def _digest(checkpoint: Checkpoint, names: Names) -> bytes:
    digest = hashlib.sha256()
    for entry in map(checkpoint.entry, names):
        with entry.file.open("rb", buffering=0) as data:
            data.seek(entry.begin)
            left = entry.nbytes
            while left:
                if not (chunk := data.read(min(left, _CHUNK))):
                    raise CheckpointError(f"{entry.file} was truncated while it was read.")
                digest.update(chunk)
                left -= len(chunk)
    return digest.digest()
