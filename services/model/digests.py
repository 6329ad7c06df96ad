"""SHA-256 digests of a checkpoint's experts, in a file next to it, to check weights from other workers.

`expertmesh digests` writes the file; workers that join read it. Torch-free. A digest covers the bytes of an expert's
matrix as they are stored: ``gate_up`` (the gate's rows, then those of the up projection) or ``down``, or those of the
biases of these. Of a quantised checkpoint, and of one that has all experts of a layer in one tensor, it covers the
weights as they are loaded in the checkpoint's own dtype. Of experts that are held quantised it
covers the parts that are held, by name one after the other; there is a file for each way to hold them. Both need torch.
"""

from __future__ import annotations

import dataclasses
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

from services.config import ExpertFormat
from services.errors import CheckpointError, WorkerExtraMissing
from services.model.checkpoint import Checkpoint
from services.model.expert_format import KINDS
from services.model.held_experts import held_experts
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
_HOW = "Workers that join will read weights from disk, not from peers; `expertmesh digests FOLDER{}` writes the file."
_DENSE: ExpertFormat = "dense"

Names = tuple[str, ...]
"""Of the tensors that make up a matrix."""
Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

log = logging.getLogger(__name__)


class LayerDigests(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Digests of one layer, in order of the experts. Those of biases are there if the experts have some."""

    gate_up: tuple[Digest, ...]
    down: tuple[Digest, ...]
    gate_up_bias: tuple[Digest, ...] = ()
    down_bias: tuple[Digest, ...] = ()


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """The file's contents. ``fingerprint`` is that of the checkpoint, ``dtype`` that of its stored experts, ``experts``
    the label of how they are held if that is quantised; ``dtype`` is then of layers that are dense."""

    format: int
    fingerprint: str
    dtype: str
    layers: dict[int, LayerDigests]
    experts: str = ""

    def of(self, layer: int, name: str, expert: int) -> bytes:
        """Return the digest of the matrix or bias ``name``, a field of :class:`LayerDigests`."""
        digests: tuple[bytes, ...] = getattr(self.layers[layer], name)
        return digests[expert]


def read_digests(model_dir: Path, spec: ModelSpec, dtype: str) -> Digests | None:
    """Return the digests of ``spec``'s experts for serving in ``dtype``; None, and a log line, where there are none."""
    file, how = digests_file(model_dir, spec), _HOW.format(_option(spec))
    try:
        found = msgspec.json.decode(file.read_bytes(), type=Digests)
    except FileNotFoundError:
        log.info("%s does not exist. %s", file, how)
        return None
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        log.warning("%s cannot be read: %s. %s", file, error, how)
        return None
    if not _fits(found, spec, dtype):
        log.warning("%s does not match these experts or the dtype %s. %s", file, dtype, how)
        return None
    return found


def _option(spec: ModelSpec) -> str:
    """Return the option with which `expertmesh digests` writes the file of experts as they are held; "" for "auto"."""
    names = {str(kind): name for name, kind in KINDS.items()} | {"": _DENSE}
    unneeded = spec.quantisation is None and not spec.experts.label
    return "" if unneeded or spec.experts.label not in names else f" --expert-format {names[spec.experts.label]}"


def digests_file(model_dir: Path, spec: ModelSpec) -> Path:
    """Return the file of the digests of experts as ``spec`` says that they are held."""
    return model_dir / (f"{FILE}-{spec.experts.label}" if spec.experts.label else FILE)


def write_digests(model_dir: Path, expert_format: ExpertFormat = "auto", progress: Progress | None = None) -> None:
    """Read all experts' weights, and write the digests of what workers with ``expert_format`` hold into the folder.
    ``progress`` gets the bytes of the files.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, has no experts, or stores them in several types.
        ConfigError: the experts cannot be held in ``expert_format``.
        OSError: the file cannot be written.
    """
    spec = load_spec(model_dir)
    with Checkpoint(model_dir, spec) as checkpoint:
        spec = dataclasses.replace(spec, experts=held_experts(spec, expert_format, checkpoint.kind, model_dir))
        progress = progress or NoProgress()
        if spec.experts.label:
            progress.begin("experts' digests", checkpoint.nbytes(chain.from_iterable(_matrices(spec))))
            digests = _digests_of_held(model_dir, spec, _OnePhase(progress))
        else:
            digests = _digests(checkpoint, spec, progress)
    file = digests_file(model_dir, spec)
    draft = file.with_name(f"{file.name}.draft")
    draft.write_bytes(msgspec.json.encode(digests))
    os.replace(draft, file)
    log.info("wrote %s: digests of %d experts in each of %d layers", file, spec.num_experts, len(digests.layers))


def hashing_threads() -> int:
    """Return one thread per core, up to what a disk or a lane has bytes for: hashing releases Python's lock."""
    return min(_MAX_THREADS, len(os.sched_getaffinity(0)))


def _fits(found: Digests, spec: ModelSpec, dtype: str) -> bool:
    if (found.format, found.fingerprint, found.experts) != (_FORMAT, spec.fingerprint, spec.experts.label):
        return False
    if all(spec.experts.of(layer) is not None for layer in spec.moe_layers) and not spec.expert_bias:
        pass  # no dtype has a part in it
    elif found.dtype not in ((dtype,) if _computed(spec) else _HOLDS.get(dtype, (dtype,))):
        return False
    fields = _fields(spec)
    counts = {len(getattr(layer, name)) for layer in found.layers.values() for name in fields}
    return tuple(sorted(found.layers)) == spec.moe_layers and counts == {spec.num_experts}


def _computed(spec: ModelSpec) -> bool:
    """Return whether experts are not in the files as they are loaded."""
    return spec.quantisation is not None or TensorNames(spec.family).together


def _fields(spec: ModelSpec) -> tuple[str, ...]:
    """Return of what an expert has digests, by the fields of :class:`LayerDigests`."""
    return ("gate_up", "down", "gate_up_bias", "down_bias") if spec.expert_bias else ("gate_up", "down")


def _matrices(spec: ModelSpec) -> list[Names]:
    """Return the tensors of each of :func:`_fields` of each expert of each layer."""
    names = TensorNames(spec.family)
    ffns = [names.expert(layer, expert) for layer in spec.moe_layers for expert in range(spec.num_experts)]
    triples = [triple for ffn in ffns for triple in ffn.tensors(biases=spec.expert_bias)]
    return [parts for gate, up, down in triples for parts in ((gate, up), (down,))]


def _digests(checkpoint: Checkpoint, spec: ModelSpec, progress: Progress) -> Digests:
    if not spec.moe_layers:
        raise CheckpointError("The checkpoint has no experts, so it can have no digests.")
    matrices = _matrices(spec)
    progress.begin("experts' digests", checkpoint.nbytes(chain.from_iterable(matrices)))
    found = []
    with _hashing(checkpoint, spec, matrices) as (dtype, digest):
        for parts, one in zip(matrices, _each(digest, matrices), strict=True):
            found.append(one)
            progress.advance(checkpoint.nbytes(parts))
    fields = _fields(spec)
    size = len(fields) * spec.num_experts
    by_layer = {
        layer: _by_field(found[at * size : (at + 1) * size], fields) for at, layer in enumerate(spec.moe_layers)
    }
    return Digests(format=_FORMAT, fingerprint=spec.fingerprint, dtype=dtype, layers=by_layer)


@contextmanager
def _hashing(
    checkpoint: Checkpoint, spec: ModelSpec, matrices: Iterable[Names]
) -> Iterator[tuple[str, Callable[[Names], bytes]]]:
    """Return the type whose bytes digests cover, and how the digest of a matrix is made."""
    if not _computed(spec):
        yield _stored_type(checkpoint, matrices), partial(_digest, checkpoint)
        return
    try:
        from services.model.dequantised.digest import digest_of_loaded, single_threads
    except ImportError as error:
        raise CheckpointError(
            f"Digests of this checkpoint's experts need torch. {WorkerExtraMissing('torch').message}"
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


def _digests_of_held(model_dir: Path, spec: ModelSpec, progress: Progress) -> Digests:
    """Return the digests of what workers hold, layer by layer: more than one is never in memory. Threads hash."""
    try:
        import torch

        from services.model.experts import tensors_of
        from services.model.weights import load_experts
    except ImportError as error:
        raise CheckpointError(
            f"Digests of quantised weights need torch. {WorkerExtraMissing('torch').message}"
        ) from error
    dtype, device, layers = getattr(torch, spec.dtype), torch.device("cpu"), {}

    def digest(parts: list[torch.Tensor], expert: int) -> bytes:
        return _hash_of(part[expert].contiguous().view(-1).view(torch.uint8).numpy().data for part in parts)

    with ThreadPoolExecutor(hashing_threads(), "digests") as pool:
        for layer in spec.moe_layers:
            wanted = {layer: range(spec.num_experts)}
            loaded = load_experts(model_dir, spec, dtype=dtype, device=device, experts=wanted, progress=progress)
            found = {}
            for name, weight in loaded[layer].matrices().items():
                parts = [tensor for _, tensor in sorted(tensors_of(name, weight).items())]
                found[name] = tuple(pool.map(partial(digest, parts), wanted[layer]))
            layers[layer] = LayerDigests(**found)
    return Digests(
        format=_FORMAT, fingerprint=spec.fingerprint, dtype=spec.dtype, layers=layers, experts=spec.experts.label
    )


class _OnePhase:
    """Takes the phases of several loads for one that has begun."""

    def __init__(self, progress: Progress) -> None:
        self.advance = progress.advance

    def begin(self, what: str, total_bytes: int) -> None:
        del what, total_bytes


def _hash_of(parts: Iterable[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _by_field(digests: list[bytes], fields: tuple[str, ...]) -> LayerDigests:
    """Sort ``digests``, which are of ``fields`` in turn."""
    return LayerDigests(**{name: tuple(digests[at :: len(fields)]) for at, name in enumerate(fields)})


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
