"""What one weight keeps between calls on a CPU: forms of its experts that torch's products take, the last used ones."""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from threading import Lock

from torch import Tensor


@dataclass(frozen=True, slots=True)
class Form:
    """``product(x_NI)`` is ``x_NI w^T`` for one expert's w; ``nbytes``: of what it holds."""

    product: Callable[[Tensor], Tensor]
    nbytes: int


def unbounded() -> int:
    """Bytes that a host of any size can spare."""
    return sys.maxsize


@dataclass(slots=True)
class Forms:
    """By key, at most so many bytes; ``written`` counts writes to the weight, and a form of before one is forgotten.

    ``spare``: asked once a form was made, returns the bytes that the host can spare beside it; where there are less
    than none, as many bytes of older forms are given up.
    """

    spare: Callable[[], int] = unbounded
    kept: OrderedDict[Hashable, tuple[Hashable, Form]] = field(default_factory=OrderedDict)
    lock: Lock = field(default_factory=Lock)

    def forget(self) -> None:
        """Give all of them up."""
        with self.lock:
            self.kept.clear()

    def get(self, key: Hashable, written: Hashable, most_bytes: float, make: Callable[[], Form]) -> Form:
        with self.lock:
            found = self.kept.get(key)
            if found is not None and found[0] == written:
                self.kept.move_to_end(key)
                return found[1]
        made = make()
        with self.lock:
            self.kept[key] = written, made
            self.kept.move_to_end(key)
            over = sum(form.nbytes for _, form in self.kept.values()) - most_bytes
            over = max(over, -self.spare())
            while over > 0 and len(self.kept) > 1:
                over -= self.kept.popitem(last=False)[1][1].nbytes
        return made
