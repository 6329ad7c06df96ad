"""What recurrent layers change in a worker's setup: the memory that states take. Pure."""

from __future__ import annotations

from dataclasses import replace

from services.attention.setup.batch_size import BatchSize
from services.model.spec import ModelSpec
from services.model.state_room import state_nbytes, state_room

GIB = 1 << 30


def beside_states(spec: ModelSpec, size: BatchSize, memory_gib: float, *, asked: bool) -> tuple[BatchSize, float]:
    """Return ``size``, with fewer sequences where their states took more than half of the memory, and the GiB that are
    left to the KV cache. ``asked``: the settings ask for so many sequences.

    Raises:
        ConfigError: that is too little for one sequence, or for as many as were asked for.
    """
    room = state_room(spec, size.max_num_seqs, asked=asked, memory=int(memory_gib * GIB))
    return replace(size, max_num_seqs=room.max_num_seqs), memory_gib - room.nbytes / GIB


def state_bytes_beside(spec: ModelSpec, seqs: int, pages: int, *, asked: bool) -> int:
    """Return the bytes of states beside ``pages`` bytes of the KV cache, within one memory of which they take half at
    most: of ``seqs`` sequences, or of as many as fit where the settings do not ask for these."""
    states = state_nbytes(spec, seqs) if spec.state_bytes else 0
    return max(states, 2 * states - pages) if asked else min(states, pages)
