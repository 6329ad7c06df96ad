"""Who owns which KV block: reference counts, and the automatic prefix cache. Pure Python, no tensors.

The batch manager asks for blocks and gives them back; :mod:`services.prefix` names what a full block holds. Sequences
with an equal prefix share the blocks of it. A block is in exactly one of three states:

* used: a sequence refers to it (several may);
* cached: nobody refers to it, but it has a name and will be found by the next sequence with that prefix;
* empty: neither. Cached and empty blocks are both ``available``: a cached one is evicted, least recently used first.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence


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
