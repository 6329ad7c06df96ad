"""SHA-256 digests of a checkpoint's experts, in a file next to it, to check weights from other workers.

`expertmesh digests` writes the file; workers that join read it. Torch-free. A digest covers the bytes of an expert's
matrix as they are stored: ``gate_up`` (the gate's rows, then those of the up projection) or ``down``. Of a quantised
checkpoint it covers the weights as they are loaded in the checkpoint's own dtype. Of experts that are held quantised it
covers the parts that are held, by name one after the other; there is a file for each way to hold them. Both need torch.
"""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from types import ModuleType
from typing import Annotated

import msgspec

from services.config import ExpertFormat
from services.errors import CheckpointError, WorkerExtraMissing
from services.model.checkpoint import Checkpoint
from services.model.header import TensorEntry
from services.model.held_experts import held_experts
from services.model.load_spec import load_spec
from services.model.names import TensorNames
from services.model.spec import ModelSpec

FILE = ".expertmesh-digests"
_FORMAT = 1
_CHUNK = 4 << 20
_MAX_THREADS = 16
_DTYPES = {"F64": "float64", "F32": "float32", "BF16": "bfloat16", "F16": "float16"}
_HOLDS = {"float32": ("float32", "bfloat16", "float16")}
"""Serving dtype -> stored dtypes of which it holds every value, so that digests of the stored bytes can check it."""
_HOW = "Workers that join will read weights from disk, not from peers; `expertmesh digests FOLDER{}` writes the file."

Digest = Annotated[bytes, msgspec.Meta(min_length=32, max_length=32)]

log = logging.getLogger(__name__)


class LayerDigests(msgspec.Struct, frozen=True, kw_only=True):
    """Digests of one layer, in order of the experts."""

    gate_up: tuple[Digest, ...]
    down: tuple[Digest, ...]


class Digests(msgspec.Struct, frozen=True, kw_only=True):
    """The file's contents. ``fingerprint`` is that of the checkpoint, ``dtype`` that of its stored experts, ``experts``
    the label of how they are held if that is quantised; ``dtype`` is then of layers that are dense."""

    format: int
    fingerprint: str
    dtype: str
    layers: dict[int, LayerDigests]
    experts: str = ""

    def of(self, layer: int, name: str, expert: int) -> bytes:
        """Return the digest of the matrix ``name``: ``gate_up`` or ``down``."""
        digests: tuple[bytes, ...] = getattr(self.layers[layer], name)
        return digests[expert]


def read_digests(model_dir: Path, spec: ModelSpec, dtype: str) -> Digests | None:
    """Return the digests of ``spec``'s experts for serving in ``dtype``; None, and a log line, where there are none."""
    file, how = digests_file(model_dir, spec), _HOW.format(" --expert-format FORMAT" if spec.experts.label else "")
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


def digests_file(model_dir: Path, spec: ModelSpec) -> Path:
    """Return the file of the digests of experts as ``spec`` says that they are held."""
    return model_dir / (f"{FILE}-{spec.experts.label}" if spec.experts.label else FILE)


def write_digests(model_dir: Path, expert_format: ExpertFormat = "auto") -> None:
    """Read all experts' weights, and write the digests of what workers with ``expert_format`` hold into the folder.

    Raises:
        CheckpointError: the checkpoint is incomplete or damaged, has no experts, or stores them in several types.
        ConfigError: the experts cannot be held in ``expert_format``.
        OSError: the file cannot be written.
    """
    spec = load_spec(model_dir)
    with Checkpoint(model_dir, spec) as checkpoint:
        spec = dataclasses.replace(spec, experts=held_experts(spec, expert_format, checkpoint.kind, model_dir))
        digests = _digests(checkpoint, spec) if not spec.experts.label else _digests_of_held(model_dir, spec)
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
    if all(spec.experts.of(layer) is not None for layer in spec.moe_layers):
        pass  # no dtype has a part in it
    elif found.dtype not in (_HOLDS.get(dtype, (dtype,)) if spec.quantisation is None else (dtype,)):
        return False
    counts = {len(by_expert) for layer in found.layers.values() for by_expert in (layer.gate_up, layer.down)}
    return tuple(sorted(found.layers)) == spec.moe_layers and counts == {spec.num_experts}


def _digests(checkpoint: Checkpoint, spec: ModelSpec) -> Digests:
    if spec.quantisation is not None:
        return _digests_of_loaded(checkpoint, spec)
    matrices = {layer: list(_matrices(checkpoint, spec, layer)) for layer in spec.moe_layers}
    types = {entry.dtype for layer in matrices.values() for pair in layer for entries in pair for entry in entries}
    if len(types) != 1:
        stored = f"stores experts in {', '.join(sorted(types))}" if types else "has no experts"
        raise CheckpointError(f"The checkpoint {stored}, so it can have no digests.")
    with ThreadPoolExecutor(hashing_threads()) as pool:
        hashing = {layer: pool.map(_digest, chain.from_iterable(pairs)) for layer, pairs in matrices.items()}
        layers = {layer: _by_matrix(list(digests)) for layer, digests in hashing.items()}
    return Digests(format=_FORMAT, fingerprint=spec.fingerprint, dtype=_DTYPES[types.pop()], layers=layers)


def _digests_of_loaded(checkpoint: Checkpoint, spec: ModelSpec) -> Digests:
    """Return the digests of what a quantised checkpoint stands for, rounded to its dtype."""
    if not spec.moe_layers:
        raise CheckpointError("The checkpoint has no experts, so it can have no digests.")
    torch = _torch()
    names, dtype = TensorNames(spec.family), getattr(torch, spec.dtype)

    def digest(*parts: str) -> bytes:
        found = hashlib.sha256()
        for part in parts:
            found.update(checkpoint.read(part).to(dtype).contiguous().view(torch.uint8).numpy().data)
        return found.digest()

    layers = {}
    for layer in spec.moe_layers:
        ffns = [names.expert(layer, expert) for expert in range(spec.num_experts)]
        gate_up = tuple(digest(ffn.gate, ffn.up) for ffn in ffns)
        layers[layer] = LayerDigests(gate_up=gate_up, down=tuple(digest(ffn.down) for ffn in ffns))
    return Digests(format=_FORMAT, fingerprint=spec.fingerprint, dtype=spec.dtype, layers=layers)


def _digests_of_held(model_dir: Path, spec: ModelSpec) -> Digests:
    """Return the digests of what workers hold, layer by layer: more than one is never in memory."""
    torch = _torch()
    from services.model.experts import DOWN, GATE_UP, tensors_of
    from services.model.weights import load_experts

    dtype, device, layers = getattr(torch, spec.dtype), torch.device("cpu"), {}
    for layer in spec.moe_layers:
        wanted = {layer: range(spec.num_experts)}
        held = load_experts(model_dir, spec, dtype=dtype, device=device, experts=wanted)[layer]
        found = {}
        for name, weight in ((GATE_UP, held.w_gate_up_E2FD), (DOWN, held.w_down_EDF)):
            parts = [tensor for _, tensor in sorted(tensors_of(name, weight).items())]
            found[name] = tuple(
                _hash_of(part[expert].contiguous().view(-1).view(torch.uint8).numpy().data for part in parts)
                for expert in range(spec.num_experts)
            )
        layers[layer] = LayerDigests(gate_up=found[GATE_UP], down=found[DOWN])
    return Digests(
        format=_FORMAT, fingerprint=spec.fingerprint, dtype=spec.dtype, layers=layers, experts=spec.experts.label
    )


def _hash_of(parts: Iterable[memoryview]) -> bytes:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.digest()


def _torch() -> ModuleType:
    try:
        import torch
    except ImportError as error:
        raise CheckpointError(
            f"Digests of quantised weights need torch. {WorkerExtraMissing('torch').message}"
        ) from error
    return torch


def _matrices(
    checkpoint: Checkpoint, spec: ModelSpec, layer: int
) -> Iterator[tuple[list[TensorEntry], list[TensorEntry]]]:
    """Yield the places of the parts of ``gate_up`` and of ``down``, expert by expert."""
    names = TensorNames(spec.family)
    for expert in range(spec.num_experts):
        ffn = names.expert(layer, expert)
        yield [checkpoint.entry(ffn.gate), checkpoint.entry(ffn.up)], [checkpoint.entry(ffn.down)]


def _by_matrix(digests: list[bytes]) -> LayerDigests:
    """Sort ``digests``, which are of ``gate_up`` and ``down`` alternately."""
    return LayerDigests(gate_up=tuple(digests[::2]), down=tuple(digests[1::2]))


def _digest(entries: Iterable[TensorEntry]) -> bytes:
    digest = hashlib.sha256()
    for entry in entries:
        with entry.file.open("rb", buffering=0) as data:
            data.seek(entry.begin)
            left = entry.nbytes
            while left:
                if not (chunk := data.read(min(left, _CHUNK))):
                    raise CheckpointError(f"{entry.file} was truncated while it was read.")
                digest.update(chunk)
                left -= len(chunk)
    return digest.digest()
