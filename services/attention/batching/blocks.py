"""Who owns which KV block: reference counts, and the automatic prefix cache. Pure Python, no tensors.

The batch manager asks for blocks and gives them back; :mod:`services.prefix` names what a full block holds. Sequences
with an equal prefix share the blocks of it (:class:`Prefixes`). A block is in exactly one of three states:

* used: a sequence refers to it (several may);
* cached: nobody refers to it, but it has a name and will be found by the next sequence with that prefix;
* empty: neither. Cached and empty blocks are both ``available``: a cached one is evicted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from services.attention.sequences.plan import StepPlan
from services.attention.sequences.sequence import SequenceState
from services.prefix import PrefixScope


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens each, numbered from 0."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.query_tokens = 0
        self.hit_tokens = 0
        self.evictions = 0
        self._references = [0] * num_blocks
        self._empty = list(range(num_blocks - 1, -1, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    @property
    def used(self) -> int:
        return self.num_blocks - self.available

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def empty(self) -> int:
        return len(self._empty)

    @property
    def available(self) -> int:
        """Blocks that can be handed out now."""
        return len(self._empty) + len(self._cached)

    def blocks_for(self, tokens: int) -> int:
        """Blocks that hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def match(self, chain: Sequence[bytes]) -> list[int]:
        """Blocks of the longest prefix in ``chain`` that is in the pool. They are not taken yet."""
        found = []
        for name in chain:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, matched: Sequence[int], new: int) -> bool:
        """Whether ``new`` blocks are available once ``matched`` are taken."""
        revived = sum(not self._references[block] for block in matched)
        return new <= self.available - revived

    def take(self, matched: Sequence[int], new: int) -> list[int]:
        """A block table: ``matched`` (from :meth:`match`), then ``new`` fresh blocks. Only if it :meth:`fits`."""
        assert self.fits(matched, new)
        for block in matched:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        return [*matched, *(self._fresh() for _ in range(new))]

    def count_lookup(self, queried_tokens: int, matched: Sequence[int]) -> None:
        """Account for one lookup that led to an admission; a sequence that keeps waiting is not counted each step."""
        self.query_tokens += queried_tokens
        self.hit_tokens += len(matched) * self.block_size

    def publish(self, block: int, name: bytes) -> None:
        """The KV of ``block`` is computed: from now on ``name`` finds it.

        Where two sequences computed the same prefix side by side, the first keeps the name and the other's block
        returns to the empty ones with its sequence.
        """
        assert self._references[block], "only a sequence that holds a block can fill it"
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Give a block table back. The tail ages first: a shorter prefix serves more sequences."""
        for block in reversed(blocks):
            assert self._references[block], "a block was released twice"
            self._references[block] -= 1
            if self._references[block]:
                continue
            if block in self._name_of:
                self._cached[block] = None
            else:
                self._empty.append(block)

    def forget(self, blocks: Sequence[int]) -> list[int]:
        """Lose the names of those ``blocks`` that nobody holds, so that none is found again; returns these blocks."""
        idle = [block for block in blocks if not self._references[block]]
        for block in idle:
            if block in self._cached:
                del self._cached[block]
                self._unname(block)
                self._empty.append(block)
        return idle

    def _unname(self, block: int) -> None:
        del self._block_of[self._name_of.pop(block)]

    def _fresh(self) -> int:
        if self._empty:
            block = self._empty.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unname(block)
            self.evictions += 1
        self._references[block] = 1
        return block


class Prefixes:
    """Over a :class:`BlockPool`, which knows blocks by name; does nothing unless ``enabled``. ``scope``: who shares."""

    def __init__(self, pool: BlockPool, *, enabled: bool, scope: PrefixScope) -> None:
        self._pool = pool
        self._enabled = enabled
        self._scope = scope

    def looks_up(self, state: SequenceState) -> bool:
        # Scoring the prompt needs a row for each of its tokens, so nothing may be skipped.
        return self._enabled and state.scored is None

    def match(self, state: SequenceState) -> list[int]:
        """Cached blocks of the sequence. The last known token is always recomputed: its row is what a draw needs."""
        if not self.looks_up(state):
            return []
        blocks = (len(state.token_ids) - 1) // self._pool.block_size
        return self._pool.match(state.extend_chain(self._pool.block_size, blocks, self._scope))

    def publish(self, state: SequenceState) -> None:
        """Let others find the blocks that ``state`` has filled."""
        block_size = self._pool.block_size
        full = state.computed // block_size
        if full == state.published or not self._enabled:
            return
        chain = state.extend_chain(block_size, full, self._scope)
        for index in range(state.published, full):
            self._pool.publish(state.blocks[index], chain[index])
        state.published = full


def make_room(pool: BlockPool, decodes: Sequence[SequenceState], ahead: int) -> bool:
    """Give each of ``decodes`` a block for the token drawn last, or ``ahead`` after it, where it is the first in one.

    They have room for all before it. False, and no blocks, if there are too few. Asking twice takes nothing more.
    """
    size = pool.block_size
    at_edge = [state for state in decodes if not (len(state.token_ids) - 1 + ahead) % size]
    growing = [state for state in at_edge if len(state.blocks) * size < len(state.token_ids) + ahead]
    if len(growing) > pool.available:
        return False
    for state in growing:
        state.blocks += pool.take((), 1)
    return True


def reserve(pool: BlockPool, running: Sequence[SequenceState]) -> int:
    """Blocks kept for ``running`` to grow by one each; without them an admission could preempt at once."""
    return sum(state.limit > len(state.blocks) * pool.block_size for state in running)


class HeldBack:
    """Keeps blocks of sequences that ended while a step launched ahead computes one more row of theirs.

    Such a row writes the KV of its token into a block that the sequence held alone, as all blocks that are not full
    are. The block goes back to ``pool`` only when that step is completed: so nobody else gets it while it may still be
    written to, nobody finds it by its name with such a row in it, and what the step left behind is known when it goes.
    At most one step is ahead at a time.
    """

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
