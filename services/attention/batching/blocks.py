"""Owners of KV blocks: reference counts, and the automatic prefix cache. Pure Python, no tensors.

The batch manager takes blocks and releases them; :mod:`services.prefix` names the contents of a full block. Sequences
with an equal prefix share its blocks (:class:`Prefixes`). A block is in exactly one of three states:

* used: one or several sequences refer to it;
* cached: no sequence refers to it, but the next one with its prefix will find it by its name;
* empty: neither. Empty and cached blocks are ``available``; cached ones are evicted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Protocol

from services.attention.sequences.plan import Piece, StepPlan
from services.attention.sequences.sequence import SequenceState
from services.prefix import PrefixScope


class States(Protocol):
    """Recurrent states of sequences, beside their blocks: ``state_slots.py`` has them."""

    def longest(self, state: SequenceState, names: Sequence[bytes], blocks: int) -> int: ...

    def start(self, state: SequenceState, name: bytes) -> None: ...

    def publish(self, state: SequenceState, names: Sequence[bytes]) -> None: ...

    def complete(self, plan: StepPlan) -> None: ...

    def retract(self, plan: StepPlan) -> None: ...

    def end(self, state: SequenceState) -> None: ...


class BlockPool:
    """``num_blocks`` blocks of ``block_size`` tokens each, numbered from 0. ``states``: of sequences, beside their
    blocks; None: the model has none."""

    def __init__(self, num_blocks: int, block_size: int, states: States | None = None) -> None:
        assert num_blocks > 0
        assert block_size > 0
        self.states = states
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.query_tokens = 0
        self.hit_tokens = 0
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
        """Return how many blocks hold ``tokens`` tokens."""
        return -(-tokens // self.block_size)

    def match(self, chain: Sequence[bytes]) -> list[int]:
        """Return the blocks of the longest prefix in ``chain`` that is in the pool, without taking them."""
        found = []
        for name in chain:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def fits(self, matched: Sequence[int], new: int) -> bool:
        """Return whether ``new`` blocks are available once ``matched`` are taken."""
        revived = sum(not self._references[block] for block in matched)
        return new <= self.available - revived

    def take(self, matched: Sequence[int], new: int) -> list[int]:
        """Take ``matched`` (from :meth:`match`) and ``new`` fresh blocks, if they :meth:`fits`. Returns all of them."""
        assert self.fits(matched, new)
        for block in matched:
            if not self._references[block]:
                del self._cached[block]
            self._references[block] += 1
        return [*matched, *(self._fresh() for _ in range(new))]

    def count_lookup(self, queried_tokens: int, matched: Sequence[int]) -> None:
        """Count a lookup that led to an admission. Lookups of a sequence that goes on waiting are not counted."""
        self.query_tokens += queried_tokens
        self.hit_tokens += len(matched) * self.block_size

    def publish(self, block: int, name: bytes) -> None:
        """Let ``name`` find ``block``, whose KV is computed.

        If two sequences computed a prefix at the same time, only the block of the first gets the name.
        """
        assert self._references[block], "only a sequence that holds a block can fill it"
        if name not in self._block_of and block not in self._name_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def release(self, blocks: Sequence[int]) -> None:
        """Give ``blocks`` back. The last ones age first: a shorter prefix serves more sequences."""
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
        """Drop the names of those ``blocks`` that no sequence holds: none is found again. Returns these."""
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
        self._references[block] = 1
        return block


class Prefixes:
    """Finds and publishes prefixes in ``pool``, unless it is not ``enabled``. ``scope``: who shares them."""

    def __init__(self, pool: BlockPool, *, enabled: bool, scope: PrefixScope) -> None:
        self._pool = pool
        self._enabled = enabled
        self._scope = scope

    def looks_up(self, state: SequenceState) -> bool:
        # Scoring the prompt needs a row for each of its tokens, so nothing may be skipped.
        return self._enabled and state.scored is None

    def match(self, state: SequenceState) -> list[int]:
        """Return cached blocks of the sequence. The last known token is recomputed: its row is what a draw needs. Where
        sequences have recurrent states, blocks end where one is kept."""
        if not self.looks_up(state):
            return []
        names, states = self._names(state), self._pool.states
        found = self._pool.match(names)
        return found if states is None else found[: states.longest(state, names, len(found))]

    def start(self, state: SequenceState, matched: int) -> None:
        """Let ``state`` begin behind the ``matched`` blocks that :meth:`match` has found."""
        state.computed, state.published = matched * self._pool.block_size, matched
        if matched and self._pool.states is not None:
            self._pool.states.start(state, self._names(state)[matched - 1])

    def under_way(self, pieces: Sequence[Piece]) -> set[bytes]:
        """Return the names that blocks get once ``pieces`` are computed."""
        names = set[bytes]()
        for piece in pieces if self._enabled else ():
            chain = piece.state.extend_chain(self._pool.block_size, piece.end // self._pool.block_size, self._scope)
            names.update(chain[piece.start // self._pool.block_size :])
        return names

    def next_name(self, state: SequenceState, matched: int) -> bytes | None:
        """Return the name of the block after the ``matched`` ones, if it can be found by name."""
        names = self._names(state) if self.looks_up(state) else []
        return names[matched] if matched < len(names) else None

    def _names(self, state: SequenceState) -> list[bytes]:
        """Return the names of the blocks that may be taken from the cache."""
        blocks = (len(state.token_ids) - 1) // self._pool.block_size
        return state.extend_chain(self._pool.block_size, blocks, self._scope)

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
        if self._pool.states is not None:
            self._pool.states.publish(state, chain)


def make_room(pool: BlockPool, decodes: Sequence[SequenceState], ahead: int) -> bool:
    """Give each of ``decodes`` a block for the token drawn last, or ``ahead`` after it, if its blocks do not hold it.

    They have room for all tokens before it. Returns False, without any, if there are too few. A second call takes none.
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
    """Return how many blocks ``running`` need to grow by one each. Without them an admission could preempt at once."""
    return sum(state.limit > len(state.blocks) * pool.block_size for state in running)


class HeldBack:
    """Keeps the blocks of ended sequences while a step that was launched ahead still computes rows of each.

    Such rows write the KV of their tokens into blocks that the sequence held alone, as it did every block that is not
    full. The blocks go back to ``pool`` only when that step is completed: until then no other sequence may get them or
    find them by name, and a failure of the step still has to zero them. At most one step is ahead at a time.
    """

    def __init__(self, pool: BlockPool) -> None:
        self._pool = pool
        self._ahead = StepPlan()
        self._blocks: dict[SequenceState, list[int]] = {}
        self._failed: set[SequenceState] = set()

    def launched(self, plan: StepPlan) -> None:
        """Note that ``plan`` was launched before it is known which of its sequences go on."""
        self._ahead = plan

    def completing(self, plan: StepPlan) -> None:
        """Note that ``plan`` is completed: sequences that end from now on are not in it."""
        self._done(plan)
        if self._pool.states is not None:
            self._pool.states.complete(plan)

    def abandoning(self, plan: StepPlan) -> None:
        """Note that ``plan`` is abandoned: sequences that end from now on are not in it, and it has left no states."""
        self._done(plan)
        if self._pool.states is not None:
            self._pool.states.retract(plan)

    def _done(self, plan: StepPlan) -> None:
        if plan is self._ahead:
            self._ahead = StepPlan()

    def release(self, state: SequenceState) -> None:
        """Release the blocks of ``state``, which has ended: now, or when the step ahead with its rows is done."""
        if self._pool.states is not None:
            self._pool.states.end(state)
        if state in self._ahead.states:
            self._blocks[state] = state.blocks
        else:
            self._pool.release(state.blocks)

    def forget(self, state: SequenceState, blocks: list[int]) -> list[int]:
        """Forget the ``blocks`` that ``state`` held when it failed; later, if they are held back."""
        if state in self._blocks:
            self._failed.add(state)
            return []
        return self._pool.forget(blocks)

    def free(self, state: SequenceState, *, failed: bool) -> list[int]:
        """Release what was held back for ``state``: the step with its rows is done. Returns the blocks to zero.

        Args:
            failed: whether those rows were broken.
        """
        blocks, failed = self._blocks.pop(state), failed or state in self._failed
        self._failed.discard(state)
        self._pool.release(blocks)
        return self._pool.forget(blocks) if failed else []
