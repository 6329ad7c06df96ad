"""What recurrent layers change in a worker's setup: options that they do not have, memory that states take. Pure."""

from __future__ import annotations

from dataclasses import replace

from services.attention.setup.batch_size import BatchSize
from services.config import Settings
from services.errors import ConfigError
from services.model.spec import ModelSpec
from services.model.state_room import state_room

GIB = 1 << 30


def check_recurrent(settings: Settings, spec: ModelSpec) -> None:
    """Refuse options that models with recurrent layers do not have. Raises ConfigError."""
    if not spec.recurrent_layers:
        return
    why = f'the model ("{spec.family}") has {len(spec.recurrent_layers)} recurrent layers'
    if settings.speculation is not None:
        raise ConfigError(
            f"--speculative-config cannot be used: {why}, whose state cannot go back behind a draft that is rejected.",
            hint="Leave it out.",
        )
    if settings.batch_invariant:
        raise ConfigError(
            f"--batch-invariant cannot be used: {why}, and how a prompt is cut into chunks changes their last bits.",
            hint="Leave it out; with --dtype float32 differences stay below what changes a greedy token.",
        )


def beside_states(spec: ModelSpec, size: BatchSize, memory_gib: float, *, asked: bool) -> tuple[BatchSize, float]:
    """Return ``size``, with fewer sequences where their states took more than half of the memory, and the GiB that are
    left to the KV cache. ``asked``: the settings ask for so many sequences.

    Raises:
        ConfigError: that is too little for one sequence, or for as many as were asked for.
    """
    room = state_room(spec, size.max_num_seqs, asked=asked, memory=int(memory_gib * GIB))
    return replace(size, max_num_seqs=room.max_num_seqs), memory_gib - room.nbytes / GIB
