"""Hashes a sample of a checkpoint's weights, which differs between fine-tunes of equal names and sizes. Torch-free.

Every dense tensor is in the sample, and of each matrix that all experts of a layer have that of one expert, which the
layer chooses. Of a checkpoint of 500 GB these are about 1,200 pieces: half a megabyte beside the headers.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from services.config import DenseFormat, ExpertFormat
from services.errors import CheckpointError
from services.model.checkpoint import Checkpoint
from services.model.header import DOWNLOAD_AGAIN, TensorEntry
from services.model.held_experts import held_experts
from services.model.held_linears import held_linears
from services.model.load_spec import unreadable
from services.model.names import dense_shapes, expert_shapes
from services.model.spec import ModelSpec
from services.wire import with_label

PIECE_BYTES = 512
"""Bytes of each tensor, from its middle: 256 values of bfloat16, of which a fine-tune changes some."""
_FILES_AT_ONCE = 16
"""A read waits for the disk, and checkpoints on network disks have many files."""
_EXPERT = re.compile(r"\.experts\.\d+\.")


def with_weights(
    spec: ModelSpec, model_dir: Path, expert_format: ExpertFormat = "dense", dense_format: DenseFormat = "dense"
) -> ModelSpec:
    """Return ``spec`` with the hash of a sample of the weights in ``model_dir``, and with how its experts and its other
    linear layers are held.

    Raises:
        CheckpointError, UnsupportedModel: see :class:`services.model.checkpoint.Checkpoint`.
        ConfigError: experts cannot be held in ``expert_format``.
    """
    with Checkpoint(model_dir, spec) as checkpoint:
        experts = held_experts(spec, expert_format, checkpoint.kind, model_dir)
        linears = held_linears(spec, dense_format, checkpoint.kind)
        names = _chosen([*dense_shapes(spec), *expert_shapes(spec)])
        entries = {(name, part): entry for name in names for part, entry in enumerate(checkpoint.entries(name))}
    by_file: dict[Path, list[TensorEntry]] = defaultdict(list)
    for entry in entries.values():
        by_file[entry.file].append(entry)
    pieces: dict[TensorEntry, bytes] = {}
    try:
        with ThreadPoolExecutor(_FILES_AT_ONCE) as pool:
            for found in pool.map(_pieces, by_file.items()):
                pieces |= found
    except OSError as error:
        raise unreadable(model_dir, error) from error
    digest = hashlib.blake2b(digest_size=16)
    for (name, _part), entry in sorted(entries.items(), key=lambda item: item[0]):
        digest.update(f"{name} {entry.dtype} ".encode() + pieces[entry])
    weights = with_label(digest.hexdigest(), experts.label, linears.label)
    return dataclasses.replace(spec, weights=weights, experts=experts, linears=linears)


def _chosen(names: Iterable[str]) -> list[str]:
    """Return all names that are no expert's, and one of each group of names that differ in the expert alone."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in names:
        groups[_EXPERT.sub(".experts.", name)].append(name)
    return [group[zlib.crc32(alike.encode()) % len(group)] for alike, group in groups.items()]


def _pieces(asked: tuple[Path, list[TensorEntry]]) -> dict[TensorEntry, bytes]:
    """Return the middle of each tensor of one file."""
    file, entries = asked
    descriptor = os.open(file, os.O_RDONLY)
    try:
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)  # what lies around a piece is not wanted yet
        return {entry: _middle(descriptor, entry) for entry in sorted(entries, key=lambda entry: entry.begin)}
    finally:
        os.close(descriptor)


def _middle(descriptor: int, entry: TensorEntry) -> bytes:
    size = min(entry.nbytes, PIECE_BYTES)
    piece = os.pread(descriptor, size, entry.begin + (entry.nbytes - size) // 2)
    if len(piece) < size:
        raise CheckpointError(f"{entry.file} was truncated while it was read.", hint=DOWNLOAD_AGAIN)
    return piece
