"""Lock-step: before each step the ranks agree whether any of them has work; then all of them run all layers.

A rank without work takes part without rows. While no rank has work, none computes, polls or sends: the first rank that
gets work sends the wake-up signal, and all agree again. A group ends as a whole: a rank that leaves announces it in an
agreement, and each of the others leaves when it has drained. Legend: T rows, D hidden size, K slots per row.
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
from typing import Generic, TypeVar

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
    """A link whose ranks pass over all MoE layers together; one pass is a turn.

    The first dispatch of a pass begins a turn. A pass that an error ended half-way is finished without rows, so that
    the other ranks do not wait; a pass that is tried again is a turn of its own.

    Args:
        agree: returns sums over the ranks, and waits for all of them.
        layers: the MoE layers, in the order of the model.
        no_rows: returns what a rank without rows dispatches.
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
        """Any thread may set this: the rank takes no more requests, as the others learn in the next agreement."""
        self.some_leave, self.all_drained = False, False
        self.turns = 0
        self.idle_turns = 0
        """Number of agreements that no rank has work: equal in all ranks."""

    def dispatch(self, layer: int, x_TD: Tensor, expert_ids_TK: Tensor, weights_TK: Tensor) -> HandleT:
        """Dispatch, after the agreement if a turn begins. Raises LockstepBroken, and from then on always."""
        if not self._left or self._left[0] != layer:
            self.finish()
            self.begin(work=True)
        assert self._left[0] == layer, "layers are passed in their order"
        return self._dispatch(x_TD, expert_ids_TK, weights_TK)

    def combine(self, handle: HandleT) -> Tensor:
        """Combine as the inner link does. Raises LockstepBroken."""
        self._open = [other for other in self._open if other is not handle]
        return self._unless_broken(lambda: self._link.combine(handle))

    @property
    def transport(self) -> str:
        return "lockstep"

    def expert_rows(self) -> dict[int, list[int]]:
        return self._link.expert_rows()

    @property
    def unannounced(self) -> bool:
        """Whether this rank leaves, and no agreement has announced that any rank does."""
        return self.leaving and not self.some_leave

    def begin(self, *, work: bool, drained: bool = False) -> bool:
        """Agree with all ranks; return whether a turn follows. Raises LockstepBroken.

        Args:
            work: this rank has rows.
            drained: this rank has finished its last request.
        """
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
        """Take part in the rest of the turn, without rows. Raises LockstepBroken."""
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


class StoreWakeUp:
    """The wake-up signal of all ranks, over the store at which they met. A thread waits there, so that no rank polls.

    Periods without work are numbered; one signal or several end a period.

    Args:
        sets, waits: two connections to the store: a connection that waits is blocked.
        keeper: this rank keeps the number of the period in the store.
        on_notify: called from the thread at each signal, and when the store is gone, since the group is gone then.
    """

    def __init__(self, sets: Store, waits: Store, *, keeper: bool, on_notify: Callable[[], None]) -> None:
        self._sets, self._waits, self._keeper, self._on_notify = sets, waits, keeper, on_notify
        self._periods: queue.SimpleQueue[int | None] = queue.SimpleQueue()
        self._listened = self._notified = -1
        self._thread = threading.Thread(target=self._wait, name="wake_up", daemon=True)
        self._thread.start()

    def notify(self, period: int) -> None:
        """Send the signal that ends ``period``. Raises LockstepBroken where the store is gone."""
        with guarded("sending the wake-up signal"):
            self._sets.set(_key(period), _SIGNAL)

    def listen(self, period: int) -> None:
        """Call ``on_notify`` when the signal of ``period`` is sent, or was sent before. Raises LockstepBroken."""
        self._listened = period
        self._periods.put(period)
        if self._keeper:
            with guarded("noting that there is no work"):
                self._sets.set(PERIOD, str(period))
                self._sets.delete_key(_key(period - 2))

    def notified(self, period: int) -> bool:
        """Return whether the signal of ``period`` has come."""
        return self._notified >= period

    def close(self) -> None:
        """End the thread and wait for it: inside torch while the interpreter ends, it would abort the process.

        This wakes the other ranks, too: call it when all have drained, or when this rank has failed.
        """
        self._periods.put(None)
        with suppress(LockstepBroken):  # without a store nobody waits there
            self.notify(self._listened)
        self._thread.join()

    def _wait(self) -> None:
        while (period := self._periods.get()) is not None:
            try:
                self._waits.wait([_key(period)], FOREVER)
            except RuntimeError as error:
                log.info("lost the ranks' store: %s", str(error).splitlines()[0])
            self._notified = period
            self._on_notify()


PERIOD, _SIGNAL = "period", "rung"
"""Key and value in the store that all releases of a group read."""


def notify_all(store: Store) -> None:
    """Send the wake-up signal to all ranks of ``store``'s group, without being one of them."""
    period = int(store.get(PERIOD)) if store.check([PERIOD]) else 1
    for number in (period, period + 1):
        store.set(_key(number), _SIGNAL)


def _key(period: int) -> str:
    return f"wake_up/{period}"


def wait_for_peers(steps: LockstepTurns[HandleT], wake_up: StoreWakeUp, seconds: float) -> None:
    """Take part without rows until all ranks have drained, ``seconds`` at most: slower ranks need this one."""
    until = time.monotonic() + seconds
    with suppress(LockstepBroken):  # another rank left sooner
        steps.finish()
        wake_up.notify(steps.idle_turns)
        while time.monotonic() < until:
            if steps.begin(work=False, drained=True):
                steps.finish()
                continue
            if steps.all_drained:
                return
            wake_up.listen(steps.idle_turns)
            while not wake_up.notified(steps.idle_turns) and time.monotonic() < until:
                time.sleep(0.02)
