"""Blocks of sequences that ended while a step launched ahead computes one more row of theirs. Pure Python.

Such a row writes the KV of its token into a block that the sequence held alone, as all blocks that are not full are.
The block goes back to the pool only when that step is completed: so nobody else gets it while it may still
be written to, nobody finds it by its name with such a row in it, and what the step left behind is known when it goes.
"""

from __future__ import annotations

from services.attention.batching.blocks import BlockPool
from services.attention.sequences.plan import StepPlan
from services.attention.sequences.sequence import SequenceState


class HeldBack:
    """Between sequences that end and ``pool``. At most one step is ahead at a time."""

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._ahead = StepPlan()
        self._blocks: dict[SequenceState, list[int]] = {}
        self._failed: set[SequenceState] = set()

    def launched(self, plan: StepPlan) -> None:
        """``plan`` computes rows before it is known that their sequences go on."""
        self._ahead = plan

    def completing(self, plan: StepPlan) -> None:
        """``plan`` is done, or given up; sequences that end from now on are not in it."""
        if plan is self._ahead:
            self._ahead = StepPlan()

    def release(self, state: SequenceState) -> None:
        """``state`` has ended. Its blocks are free now, or when the step ahead with its row is done."""
        if state in self._ahead.decodes:
            self._blocks[state] = state.blocks
        else:
            self._pool.release(state.blocks)

    def forget(self, state: SequenceState, blocks: list[int]) -> list[int]:
        """As :meth:`BlockPool.forget` for what ``state`` held when it failed; later, if that is held back."""
        if state in self._blocks:
            self._failed.add(state)
            return []
        return self._pool.forget(blocks)

    def free(self, state: SequenceState, *, failed: bool) -> list[int]:
        """The step with the row of ``state``, which had ended before, is done. Returns the blocks to zero.

        Args:
            failed: whether that row was broken.
        """
        blocks, failed = self._blocks.pop(state), failed or state in self._failed
        self._failed.discard(state)
        self._pool.release(blocks)
        return self._pool.forget(blocks) if failed else []
