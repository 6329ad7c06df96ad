"""What recurrent layers change in a worker's setup: the memory that states take. Pure."""

from __future__ import annotations

from dataclasses import replace

from services.attention.setup.batch_size import BatchSize
from services.model.spec import ModelSpec
from services.model.state_room import state_room

GIB = 1 << 30


def beside_states(spec: ModelSpec, size: BatchSize, memory_gib: float, *, asked: bool) -> tuple[BatchSize, float]:
    """Return ``size``, with fewer sequences where their states took more than half of the memory, and the GiB that are
    left to the KV cache. ``asked``: the settings ask for so many sequences.

    Raises:
        ConfigError: that is too little for one sequence, or for as many as were asked for.
    """
    room = state_room(spec, size.max_num_seqs, asked=asked, memory=int(memory_gib * GIB))
    return replace(size, max_num_seqs=room.max_num_seqs), memory_gib - room.nbytes / GIB
