"""BlockPool against a plain model of ownership: no block lost, owned twice by accident, or evicted out of order."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from services.attention.batching.blocks import BlockPool
from services.prefix import prefix_chain

BLOCKS, BLOCK_SIZE = 6, 2


class PoolMachine(RuleBasedStateMachine):
    """Sequences over a two-letter alphabet, so that prefixes collide all the time."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, BLOCK_SIZE)
        self.tables: list[tuple[tuple[int, ...], list[int]]] = []
        self.content: dict[bytes, int] = {}  # name -> block that was published under it and not evicted since
        self.idle_order: list[int] = []  # cached blocks, least recently used first

    def _revive(self, blocks: list[int]) -> None:
        self.idle_order = [block for block in self.idle_order if block not in blocks]

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=9))
    def admit(self, tokens: list[int]) -> None:
        chain = list(prefix_chain(tokens, BLOCK_SIZE, b""))[: (len(tokens) - 1) // BLOCK_SIZE]
        matched = self.pool.match(chain)
        expected = []
        for name in chain:
            if name not in self.content:
                break
            expected.append(self.content[name])
        assert matched == expected
        new = self.pool.blocks_for(len(tokens)) - len(matched)
        if not self.pool.fits(matched, new):
            assert new > self.pool.available - sum(block in self.idle_order for block in matched)
            return
        before_empty, before_idle = self.pool.empty, [b for b in self.idle_order if b not in matched]
        table = self.pool.take(matched, new)
        evicted = before_idle[: max(0, new - before_empty)]
        self._revive(matched + evicted)
        self.content = {name: block for name, block in self.content.items() if block not in evicted}
        owned = {block for _, blocks in self.tables for block in blocks}
        assert not owned & set(table[len(matched) :]), "a fresh block already has an owner"
        assert set(evicted) <= set(table[len(matched) :]), "eviction is not least recently used first"
        self.tables.append((tuple(tokens), table))

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        tokens, table = data.draw(st.sampled_from(self.tables))
        for name, block in zip(prefix_chain(tokens, BLOCK_SIZE, b""), table, strict=False):
            self.pool.publish(block, name)
            if name not in self.content and block not in self.content.values():
                self.content[name] = block

    @precondition(lambda self: self.tables)
    @rule(data=st.data(), forget=st.booleans())
    def release(self, data: st.DataObject, forget: bool) -> None:
        _, table = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.pool.release(table)
        owned = {block for _, blocks in self.tables for block in blocks}
        named = set(self.content.values())
        self.idle_order += [block for block in reversed(table) if block not in owned and block in named]
        if forget:
            zeroed = self.pool.forget(table)
            assert set(zeroed) == set(table) - owned
            self.content = {name: block for name, block in self.content.items() if block not in zeroed}
            self._revive(zeroed)

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        references = Counter(block for _, blocks in self.tables for block in blocks)
        assert self.pool.used == len(references)
        assert self.pool.cached == len(self.idle_order)
        assert self.pool.used + self.pool.cached + self.pool.empty == BLOCKS
        assert [self.pool._references[block] for block in range(BLOCKS)] == [references[b] for b in range(BLOCKS)]

    @invariant()
    def only_equal_prefixes_share(self) -> None:
        holders: dict[int, set[tuple[int, ...]]] = {}
        for tokens, table in self.tables:
            for index, block in enumerate(table):
                holders.setdefault(block, set()).add((index, *tokens[: (index + 1) * BLOCK_SIZE]))
        assert all(len(prefixes) == 1 for prefixes in holders.values())


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)


def test_a_block_is_found_only_once_its_content_is_computed() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    chain = list(prefix_chain([1, 2], BLOCK_SIZE, b""))
    (block,) = pool.take((), 1)
    assert pool.match(chain) == []
    pool.publish(block, chain[0])
    assert pool.match(chain) == [block]


def test_lookups_are_counted_in_tokens() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    pool.count_lookup(7, [0, 1])
    assert (pool.query_tokens, pool.hit_tokens) == (7, 4)


def test_releasing_twice_is_a_bug() -> None:
    pool = BlockPool(4, BLOCK_SIZE)
    table = pool.take((), 2)
    pool.release(table)
    with pytest.raises(AssertionError):
        pool.release(table)
