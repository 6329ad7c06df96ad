"""How many recurrent states a worker has room for, beside the pages of its KV cache. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from services.errors import ConfigError
from services.model.spec import ModelSpec

ZERO_SLOT, SPARE_SLOT, FIRST_SLOT = 0, 1, 2
"""The slot that is always zero, from which sequences start; that for rows of no sequence; the first of the others."""
STATES_PER_SEQUENCE = 4
"""Slots for each sequence of the batch: the state that a step reads, the one that it writes, the one that the step
launched ahead writes, and one to keep for prompts that begin alike."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Kept:
    """The state of a sequence, by its number in a step, after ``rows`` of its rows, which are not all: it goes into
    ``slot``, too."""

    sequence: int
    rows: int
    slot: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StateRoom:
    """States of so many sequences, and their bytes. 0 bytes: the model has none."""

    max_num_seqs: int
    nbytes: int


def state_slots(spec: ModelSpec, max_num_seqs: int) -> int:
    """Return how many states are held for so many sequences, without the two that are no sequence's."""
    return STATES_PER_SEQUENCE * max_num_seqs if spec.state_bytes else 0


def state_room(spec: ModelSpec, max_num_seqs: int, *, asked: bool, memory: int | None) -> StateRoom:
    """Return of how many sequences, at most ``max_num_seqs``, the states take half of ``memory`` or less.

    Args:
        asked: the settings ask for so many; fewer are an error.
        memory: bytes for states and pages together; None: there is no such bound.

    Raises:
        ConfigError: they are more than fit.
    """
    if not spec.state_bytes:
        return StateRoom(max_num_seqs=max_num_seqs, nbytes=0)
    fit = max_num_seqs if memory is None else min(max_num_seqs, _within(memory // 2, spec))
    if fit < (max_num_seqs if asked else 1):
        wanted = max_num_seqs if asked else 1
        lower = f"Lower --max-num-seqs to at most {fit}, or raise" if fit else "Raise"
        raise ConfigError(
            f"Recurrent states of {wanted} sequences take {state_nbytes(spec, wanted) / 2**30:.3g} GiB, more than half "
            f"of the {(memory or 0) / 2**30:.3g} GiB for states and KV cache.",
            hint=f"{lower} --kv-memory-gib.",
        )
    return StateRoom(max_num_seqs=fit, nbytes=state_nbytes(spec, fit))


def state_nbytes(spec: ModelSpec, max_num_seqs: int) -> int:
    """Return the bytes of all states of so many sequences."""
    return (state_slots(spec, max_num_seqs) + FIRST_SLOT) * spec.state_bytes


def _within(memory: int, spec: ModelSpec) -> int:
    return max(0, memory // spec.state_bytes - FIRST_SLOT) // STATES_PER_SEQUENCE
