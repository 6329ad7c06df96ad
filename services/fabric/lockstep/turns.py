"""Lock-step: before each step the ranks agree whether any of them has work; then all take all layers.

A rank without work takes part without rows. While nobody has any, nobody computes, polls or sends: whoever gets work
rings a wake-up signal, and all agree again. A group lives as a whole: one that leaves says so with an agreement, and
the others then leave too, each when it has drained. Legend: T rows, D hidden size, K slots per row.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Generic, Protocol, TypeVar

from torch import Tensor
from torch.distributed.distributed_c10d import Store

from services.errors import LockstepBroken
from services.fabric.link import CountingLink, SynchronousLink
from services.fabric.lockstep.gloo import guarded

HandleT = TypeVar("HandleT")
Rows = tuple[Tensor, Tensor, Tensor]
"""``x_TD, expert_ids_TK, weights_TK``."""
FOREVER = timedelta(days=30)

log = logging.getLogger(__name__)


class LockstepTurns(SynchronousLink, Generic[HandleT]):
    """A link whose ranks take turns together; a turn is one pass over all MoE layers.

    The first dispatch of a pass begins a turn. A pass that an error ended half-way is finished without rows, so that
    the other ranks are not kept waiting; a pass that is tried again is a turn of its own.

    Args:
        agree: sums over the ranks; waits for all of them.
        layers: the MoE layers, in the order in which they are passed.
        no_rows: what a rank without rows dispatches.
    """

    def __init__(
        self,
        link: CountingLink[HandleT],
        agree: Callable[[Sequence[int]], list[int]],
        *,
        ranks: int,
        layers: Sequence[int],
        no_rows: Callable[[], Rows],
    ) -> None:
        self._link, self._agree = link, agree
        self._ranks, self._layers, self._no_rows = ranks, layers, no_rows
        self._left: deque[int] = deque()
        self._open: list[HandleT] = []
        self._broken: LockstepBroken | None = None
        self.leaving = False
        """May be set from any thread: this rank takes no more requests. The others hear of it when all agree next."""
        self.some_leave, self.all_drained = False, False
        self.turns = 0
        self.idle_turns = 0
        """Agreements that nobody has work: the same number in every rank."""

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> HandleT:
        """Raises LockstepBroken, and from then on always."""
        if not self._left or self._left[0] != layer:
            self.finish()
            self.begin(work=True)
        assert self._left[0] == layer, "layers are passed in their order"
        return self._dispatch(x_TD, expert_ids_TK, weights_TK)

    def combine(self, handle: HandleT) -> Tensor:
        """Raises LockstepBroken."""
        self._open = [other for other in self._open if other is not handle]
        return self._unless_broken(lambda: self._link.combine(handle))

    def expert_rows(self) -> dict[int, list[int]]:
        return self._link.expert_rows()

    @property
    def untold(self) -> bool:
        """Whether this rank leaves, and the others know of none that does."""
        return self.leaving and not self.some_leave

    def begin(self, *, work: bool, drained: bool = False) -> bool:
        """Agree with all ranks; whether a turn follows. ``drained``: nothing is left here. Raises LockstepBroken."""
        said = [int(work), int(self.leaving or drained), int(drained)]
        working, leavers, done = self._unless_broken(lambda: self._agree(said))
        if working:
            self._left = deque(self._layers)
            self.turns += 1
        else:
            self.idle_turns += 1
        self.some_leave, self.all_drained = leavers > 0, done == self._ranks
        return working > 0

    def finish(self) -> None:
        """Take part in what is left of the turn, without rows. Raises LockstepBroken."""
        while self._open:
            self.combine(self._open[0])
        while self._left:
            self.combine(self._dispatch(*self._no_rows()))

    def _dispatch(self, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> HandleT:
        layer = self._left.popleft()
        handle = self._unless_broken(lambda: self._link.dispatch(layer, x_TD, expert_ids_TK, weights_TK))
        self._open.append(handle)
        return handle

    ResultT = TypeVar("ResultT")

    def _unless_broken(self, call: Callable[[], ResultT]) -> ResultT:
        if self._broken is not None:
            raise self._broken
        try:
            return call()
        except LockstepBroken as error:
            self._broken = error
            raise


class WakeUp(Protocol):
    """Heard by all ranks. Periods without work are numbered; each is ended by one ring or several."""

    def ring(self, period: int) -> None: ...

    def listen(self, period: int) -> None:
        """Make ``on_notify`` be called when that period's wake-up signal rings, or has rung."""

    def heard(self, period: int) -> bool: ...


class StoreWakeUp:
    """Over the store by which the ranks found one another. A thread of its own waits there, so that none polls.

    Args:
        rings, waits: two connections to the store: one that waits is blocked.
        on_notify: called from the thread; also when the store is gone, since then the group is.
    """

    def __init__(self, rings: Store, waits: Store, *, keeper: bool, on_notify: Callable[[], None]) -> None:
        self._rings, self._waits, self._keeper, self._on_ring = rings, waits, keeper, on_notify
        self._periods: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._listened = self._heard = -1
        self._thread = threading.Thread(target=self._wait, name="wake_up", daemon=True)
        self._thread.start()

    def ring(self, period: int) -> None:
        """Raises LockstepBroken: the store is gone."""
        with guarded("ringing for work"):
            self._rings.set(_key(period), "rung")

    def listen(self, period: int) -> None:
        self._listened = period
        self._periods.put(period)
        if self._keeper:
            with guarded("noting that there is no work"):
                self._rings.set(PERIOD, str(period))
                self._rings.delete_key(_key(period - 2))

    def heard(self, period: int) -> bool:
        return self._heard >= period

    def close(self) -> None:
        """End the thread, and wait for it: inside torch as the interpreter ends, it would abort the process. Wakes the
        other ranks, too: it is for when all have drained, or this one has failed them."""
        self._periods.put(None)
        with suppress(LockstepBroken):  # without a store nobody waits there
            self.ring(self._listened)
        self._thread.join()

    def _wait(self) -> None:
        while (period := self._periods.get()) is not None:
            try:
                self._waits.wait([_key(period)], FOREVER)
            except RuntimeError as error:
                log.info("the ranks' store is gone: %s", str(error).splitlines()[0])
            self._heard = period
            self._on_ring()


PERIOD = "period"


def notify_all(store: Store) -> None:
    """Ring for whoever waits, without being one of the ranks."""
    period = int(store.get(PERIOD)) if store.check([PERIOD]) else 1
    for number in (period, period + 1):
        store.set(_key(number), "rung")


def _key(period: int) -> str:
    return f"wake_up/{period}"


def wait_for_peers(steps: LockstepTurns[HandleT], wake_up: WakeUp, seconds: float) -> None:
    """Take part without rows until all have drained, for ``seconds`` at most: those that take longer need this one."""
    until = time.monotonic() + seconds
    with suppress(LockstepBroken):  # another one left sooner
        steps.finish()
        wake_up.ring(steps.idle_turns)
        while time.monotonic() < until:
            if steps.begin(work=False, drained=True):
                steps.finish()
                continue
            if steps.all_drained:
                return
            wake_up.listen(steps.idle_turns)
            while not wake_up.heard(steps.idle_turns) and time.monotonic() < until:
                time.sleep(0.02)
