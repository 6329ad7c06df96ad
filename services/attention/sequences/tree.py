"""Trees of drafts: chains that may follow a sequence, merged where they begin alike (ExpertFlow, 3.4). Pure Python.

Nodes are in depth-first order. Row 0 of a step stands for the last known token, and row i + 1 for node i; a node comes
after its parent, and the first chain is in the first rows. A row sees what is known and its ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import msgspec

MAX_NODES = 64
"""Most nodes of a tree: the ancestors of each are a word of so many bits."""


class TokenTree(msgspec.Struct, frozen=True):
    """``tokens`` of the nodes, and ``parents``, the row of each one's parent. Children of a row have different tokens.

    Example: the chains 5 6 and 5 7 of a known 4: tokens (5, 6, 7), parents (0, 1, 1).
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()

    @classmethod
    def of(cls, chains: Sequence[Sequence[int]], most: int) -> TokenTree:
        """Merge ``chains``. Nodes of the first ones come first, until there are ``most``."""
        children: list[dict[int, int]] = [{}]
        for chain in chains:
            at = 0
            for token in chain:
                if token not in children[at]:
                    if len(children) > most:
                        break
                    children[at][token] = len(children)
                    children.append({})
                at = children[at][token]
        tokens, parents = list[int](), list[int]()
        pending = [(token, child, 0) for token, child in reversed(children[0].items())]
        while pending:
            token, node, parent = pending.pop()
            tokens.append(token)
            parents.append(parent)
            pending += [(each, child, len(tokens)) for each, child in reversed(children[node].items())]
        return cls(tuple(tokens), tuple(parents))

    @property
    def branches(self) -> bool:
        """Whether a row has two children: otherwise it is a chain."""
        return any(parent != row for row, parent in enumerate(self.parents))

    def depths(self) -> list[int]:
        """Return of each row how many drafts it is behind the last known token."""
        depths = [0]
        for parent in self.parents:
            depths.append(depths[parent] + 1)
        return depths

    def ancestors(self) -> list[int]:
        """Return of each row a word in which bit i says that it is node i, or that this is an ancestor."""
        words = [0]
        for node, parent in enumerate(self.parents):
            words.append(words[parent] | 1 << node)
        return words

    def path(self, row: int) -> list[int]:
        """Return the rows from the first draft to ``row``."""
        path = list[int]()
        while row:
            path.append(row)
            row = self.parents[row - 1]
        return path[::-1]

    def walk(self, drawn: Sequence[int | None]) -> list[int]:
        """Return the rows of the drafts that are right, by what each row drew: of a row's children the one with the
        token that the row drew, and so on from that one."""
        path, at = list[int](), 0
        for row, (token, parent) in enumerate(zip(self.tokens, self.parents, strict=True), start=1):
            if parent == at and token == drawn[at]:
                path.append(row)
                at = row
        return path

    def levels(self) -> Iterator[tuple[int, int]]:
        """Yield of each row its depth, and how many rows before it have the same."""
        seen = dict[int, int]()
        for depth in self.depths():
            number = seen.get(depth, 0)
            seen[depth] = number + 1
            yield depth, number
