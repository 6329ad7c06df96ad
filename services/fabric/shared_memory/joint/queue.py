"""Begins the steps of a seat's clients: alone at once, or together with steps of other clients once those have come."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moe_kernels.exchange.layout import MAX_MEMBERS, Layout
from services.errors import ExpertMeshError, WireError
from services.fabric.shared_memory.joint.policy import JoinPolicy
from services.fabric.shared_memory.joint.steps import Client, JointStep, PendingStep
from services.fabric.shared_memory.messages import Step

log = logging.getLogger(__name__)

HOLD_SHARE, GRACE_SHARE = 0.3, 0.4
"""Shares of the time that an attention worker waits for an answer: a step is held for the first share at most, a layer
waits the second one for late members, and the rest is for the call."""
_RECHECK_S = 0.0002


@dataclass(slots=True)
class _LayoutGroup:
    """Clients whose memory has one layout. Steps are ``held`` for those of ``awaited`` places, but not past ``until``.

    No joint step could be made for the numbers of members in ``refused``.
    """

    policy: JoinPolicy = field(default_factory=JoinPolicy)
    clients: list[Client] = field(default_factory=list)
    joint_steps: tuple[JointStep, ...] = ()
    refused: set[int] = field(default_factory=set)
    held: list[PendingStep] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)
    until: float = 0.0

    def missing(self) -> int | None:
        """Return the smallest number of members for which a joint step should be made; None where all are made."""
        made = {joint_step.members for joint_step in self.joint_steps} | self.refused
        size = 2
        while size <= MAX_MEMBERS and size < 2 * len(self.clients):
            if size not in made:
                return size
            size *= 2
        return None


class JoinQueue:
    """Decides when steps begin. Thread-safe.

    Args:
        make: ``(layout, members) -> joint step``, called in a thread of its own; with None all steps run alone.
        wait_s: how long a started step waits for rows.
    """

    def __init__(self, make: Callable[[Layout, int], JointStep] | None, wait_s: float) -> None:
        self._make, self._wait_s = make, wait_s
        self._changed = threading.Condition()
        self._groups: dict[Layout, _LayoutGroup] = {}
        self._closed = False
        self._left_s = 0.0
        self.joined_steps = 0
        if make is not None:
            for work, name in ((self._watch, "shared memory join queue"), (self._build, "shared memory joint steps")):
                threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def seconds(self) -> float:
        """Seconds that joint steps have computed since the start."""
        with self._changed:
            return self._left_s + sum(
                joint_step.seconds for group in self._groups.values() for joint_step in group.joint_steps
            )

    def idle(self) -> bool:
        """Return whether no step is held and no joint step runs."""
        with self._changed:
            return all(
                not group.held and all(joint_step.idle() for joint_step in group.joint_steps)
                for group in self._groups.values()
            )

    def enter(self, client: Client) -> None:
        """Add ``client``, whose own steps are prepared; joint steps are made while it is already served."""
        with self._changed:
            self._groups.setdefault(client.layout, _LayoutGroup()).clients.append(client)
            self._changed.notify_all()

    def begin(self, client: Client, step: Step) -> None:
        """Begin ``step`` at once, or hold it for steps of other clients.

        Raises:
            WireError: ``client`` has not entered, or its last joint step has not ended within ``wait_s``.
        """
        with self._changed:
            group, pending, now = self._of(client), PendingStep(client, step), time.monotonic()
            self._drop(group, client)
            if not self._parted(group, client):
                raise WireError(f"A step of client {client.place} cannot start: a call with its rows has not ended.")
            awaited = client.place in group.awaited
            group.awaited.discard(client.place)
            may_join = group.joint_steps and step.whole and step.micro_batches == 1
            if not may_join:
                group.policy.rest(client.place)
            if not may_join or not self._hold(group, pending, now, awaited=awaited):
                self._start(group, None, [pending])
            self._begin_held(group)

    def stop(self, client: Client, give_up: Callable[[], None]) -> None:
        """End the failed step of ``client`` without waiting for a call; ``give_up`` ends one that runs alone."""
        with self._changed:
            group = self._of(client)
            self._drop(group, client)
            for joint_step in group.joint_steps:
                if joint_step.was_late(client):
                    seconds = group.policy.failed(client.place, time.monotonic())
                    log.warning(
                        "client %d was late in a joint step; its steps run alone for %g s", client.place, seconds
                    )
                joint_step.leave_out(client)
            give_up()
            self._begin_held(group)

    def leave(self, client: Client) -> bool:
        """Remove ``client`` and wait for joint steps with its rows; return whether none uses its memory any more."""
        with self._changed:
            group = self._groups.get(client.layout)
            if group is None or client not in group.clients:
                return True
            self._drop(group, client)
            parted = self._parted(group, client)
            group.policy.leave(client.place)
            group.clients.remove(client)
            group.awaited.discard(client.place)
            self._begin_held(group)
            if not group.clients:
                del self._groups[client.layout]
                self._left_s += sum(joint_step.seconds for joint_step in group.joint_steps)
                for joint_step in group.joint_steps:
                    joint_step.close()
            return parted

    def close(self) -> None:
        """Begin no more steps."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for group in self._groups.values():
                for joint_step in group.joint_steps:
                    joint_step.close()
                group.joint_steps = ()

    def _of(self, client: Client) -> _LayoutGroup:
        group = self._groups.get(client.layout)
        if group is None or client not in group.clients:
            raise WireError(f"Client {client.place} started or stopped a step before its steps were prepared.")
        return group

    def _hold(self, group: _LayoutGroup, pending: PendingStep, now: float, *, awaited: bool) -> bool:
        """Hold the step if steps of other clients are expected soon, or were held for it; return whether it is held."""
        hold = group.policy.come(pending.client.place, pending.step.bucket, now, HOLD_SHARE * pending.step.deadline_s)
        if hold is None or not (hold.places or awaited):
            return False
        if group.held:
            group.until = min(group.until, now + HOLD_SHARE * pending.step.deadline_s)
        else:
            group.awaited, group.until = set(hold.places), now + hold.seconds
        group.held.append(pending)
        return True

    def _begin_held(self, group: _LayoutGroup) -> None:
        """Begin the held steps once no awaited step is missing, or the time is over."""
        if not group.held:
            return
        if group.awaited and time.monotonic() < group.until:
            self._changed.notify_all()
            return
        left, group.held = sorted(group.held, key=lambda pending: -pending.step.bucket), []
        while left:
            joint_step, size = _joint_step_for(group.joint_steps, left)
            try:
                self._start(group, joint_step, left[:size])
            except Exception:  # other steps go on; these miss their deadlines, and their clients begin them again
                log.exception("cannot start %d steps", size)
            left = left[size:]

    def _start(self, group: _LayoutGroup, joint_step: JointStep | None, steps: Sequence[PendingStep]) -> None:
        """Begin ``steps`` as one joint step or, without one, the only step alone."""
        if joint_step is None:
            steps[0].client.begin(steps[0].step, self._wait_s)
        else:
            joint_step.start(steps, GRACE_SHARE * min(pending.step.deadline_s for pending in steps))
            self.joined_steps += len(steps)
        for pending in steps:
            group.policy.began(pending.client.place, time.monotonic(), together=joint_step is not None)

    @staticmethod
    def _drop(group: _LayoutGroup, client: Client) -> None:
        group.held = [pending for pending in group.held if pending.client is not client]

    def _parted(self, group: _LayoutGroup, client: Client) -> bool:
        """Return whether no joint step uses the client's memory any more; other clients begin steps meanwhile."""
        return all(joint_step.part(client, lambda: self._changed.wait(_RECHECK_S)) for joint_step in group.joint_steps)

    def _watch(self) -> None:
        """Begin held steps when their time is over."""
        with self._changed:
            while not self._closed:
                untils = [group.until for group in self._groups.values() if group.held]
                self._changed.wait(max(0.0, min(untils) - time.monotonic()) if untils else None)
                for group in list(self._groups.values()):
                    self._begin_held(group)

    def _build(self) -> None:
        """Make missing joint steps, one after the other, while steps run."""
        assert self._make is not None
        while (wanted := self._wanted()) is not None:
            layout, members = wanted
            joint_step = None
            try:
                joint_step = self._make(layout, members)
            except (ExpertMeshError, RuntimeError) as error:
                log.warning("cannot run joint steps of %d attention workers: %s", members, error)
            except Exception:  # the thread's boundary: steps run alone, other joint steps are made
                log.exception("cannot run joint steps of %d attention workers", members)
            with self._changed:
                group = self._groups.get(layout)
                if group is None or self._closed:
                    if joint_step is not None:
                        joint_step.close()
                elif joint_step is None:
                    group.refused.add(members)
                else:
                    group.joint_steps = tuple(sorted((*group.joint_steps, joint_step), key=lambda one: one.members))

    def _wanted(self) -> tuple[Layout, int] | None:
        """Wait until a joint step is missing; None once the queue is closed."""
        with self._changed:
            while not self._closed:
                for layout, group in self._groups.items():
                    if (members := group.missing()) is not None:
                        return layout, members
                self._changed.wait()
            return None


def _joint_step_for(joint_steps: Sequence[JointStep], steps: Sequence[PendingStep]) -> tuple[JointStep | None, int]:
    """Choose the smallest joint step that takes the most of ``steps``, and how many; with None the first runs alone."""
    for size in range(len(steps), 1, -1):
        for joint_step in joint_steps:
            if joint_step.fits(steps[:size]):
                return joint_step, size
    return None, 1
