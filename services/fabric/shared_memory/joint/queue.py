"""Begins the steps of a seat's clients: alone at once, or when those have come that they are to run with."""

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

HOLD_SHARE, PATIENCE_SHARE = 0.3, 0.4
"""Of the time that an attention worker waits for an answer: how long its step is held, at most, and how long it then
waits in a layer for the rows of others; the rest is for the call."""
_RECHECK_S = 0.0002


@dataclass(slots=True)
class _LayoutGroup:
    """Clients with memory of one layout. ``held``: steps that have come, until those of ``awaited`` places come, or the
    time does."""

    policy: JoinPolicy = field(default_factory=JoinPolicy)
    clients: list[Client] = field(default_factory=list)
    joint_steps: tuple[JointStep, ...] = ()
    refused: set[int] = field(default_factory=set)
    """Sizes of joint steps that could not be made."""
    held: list[PendingStep] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)
    until: float = 0.0

    def missing(self) -> int | None:
        """The smallest size of a joint step that is wanted and not there."""
        there = {joint_step.members for joint_step in self.joint_steps} | self.refused
        size = 2
        while size <= MAX_MEMBERS and size < 2 * len(self.clients):
            if size not in there:
                return size
            size *= 2
        return None


class JoinQueue:
    """From any thread.

    Args:
        make: a joint step of so many for clients of a layout, in a thread for that; None: steps run alone.
        wait_s: how long a started step waits for rows.
    """

    def __init__(self, make: Callable[[Layout, int], JointStep] | None, wait_s: float) -> None:
        self._make, self._wait_s = make, wait_s
        self._changed = threading.Condition()
        self._alike: dict[Layout, _LayoutGroup] = {}
        self._closed = False
        self._of_the_gone_s = 0.0
        self.joined_steps = 0
        if make is not None:
            for work, name in ((self._watch, "shared memory join queue"), (self._build, "shared memory joint steps")):
                threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def seconds(self) -> float:
        """That steps of joint steps computed."""
        with self._changed:
            return self._of_the_gone_s + sum(
                joint_step.seconds for alike in self._alike.values() for joint_step in alike.joint_steps
            )

    def idle(self) -> bool:
        with self._changed:
            return all(
                not alike.held and all(joint_step.idle() for joint_step in alike.joint_steps)
                for alike in self._alike.values()
            )

    def enter(self, client: Client) -> None:
        """Its own steps are prepared. Joint steps are made while it is served already."""
        with self._changed:
            self._alike.setdefault(client.layout, _LayoutGroup()).clients.append(client)
            self._changed.notify_all()

    def begin(self, client: Client, step: Step) -> None:
        """Begin its step: at once, or when those have come that it is to run with.

        Raises:
            WireError: it has not entered; its last step is still being computed with others', after ``wait_s``.
        """
        with self._changed:
            alike, coming, now = self._of(client), PendingStep(client, step), time.monotonic()
            self._drop(alike, client)
            if not self._parted(alike, client):
                raise WireError(f"A step of client {client.place} cannot begin: a call with its rows did not end.")
            awaited = client.place in alike.awaited
            alike.awaited.discard(client.place)
            may_join = alike.joint_steps and step.whole and step.micro_batches == 1
            if not may_join:
                alike.policy.rest(client.place)
            if not may_join or not self._hold(alike, coming, now, awaited=awaited):
                self._begin_alone(alike, coming)
            self._look(alike)

    def stop(self, client: Client, give_up: Callable[[], None]) -> None:
        """No more rows come of the step that it began last, which has failed. Waits for no call."""
        with self._changed:
            alike = self._of(client)
            self._drop(alike, client)
            for joint_step in alike.joint_steps:
                if joint_step.was_late(client):
                    seconds = alike.policy.failed(client.place, time.monotonic())
                    log.warning("Client %d was late in a step with others: alone for %g s.", client.place, seconds)
                joint_step.leave_out(client)
            give_up()
            self._look(alike)

    def leave(self, client: Client) -> bool:
        """Whether no joint step uses its memory any more, which is waited for."""
        with self._changed:
            alike = self._alike.get(client.layout)
            if alike is None or client not in alike.clients:
                return True
            self._drop(alike, client)
            parted = self._parted(alike, client)
            alike.policy.leave(client.place)
            alike.clients.remove(client)
            alike.awaited.discard(client.place)
            self._look(alike)
            if not alike.clients:
                del self._alike[client.layout]
                self._of_the_gone_s += sum(joint_step.seconds for joint_step in alike.joint_steps)
                for joint_step in alike.joint_steps:
                    joint_step.close()
            return parted

    def close(self) -> None:
        """Begin nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for alike in self._alike.values():
                for joint_step in alike.joint_steps:
                    joint_step.close()
                alike.joint_steps = ()

    def _of(self, client: Client) -> _LayoutGroup:
        alike = self._alike.get(client.layout)
        if alike is None or client not in alike.clients:
            raise WireError(f"Client {client.place} has no part in steps yet.")
        return alike

    def _hold(self, alike: _LayoutGroup, coming: PendingStep, now: float, *, awaited: bool) -> bool:
        """Whether it waits, for others or with those that did for it."""
        hold = alike.policy.come(coming.client.place, coming.step.bucket, now, HOLD_SHARE * coming.step.deadline_s)
        if hold is None or not (hold.places or awaited):
            return False
        if alike.held:
            alike.until = min(alike.until, now + HOLD_SHARE * coming.step.deadline_s)
        else:
            alike.awaited, alike.until = set(hold.places), now + hold.seconds
        alike.held.append(coming)
        return True

    def _look(self, alike: _LayoutGroup) -> None:
        """Begin what is held, once there is nobody left to wait for, or no time."""
        if not alike.held:
            return
        if alike.awaited and time.monotonic() < alike.until:
            self._changed.notify_all()
            return
        left, alike.held = sorted(alike.held, key=lambda joining: -joining.step.bucket), []
        while left:
            joint_step, size = _joint_step_for(alike.joint_steps, left)
            try:
                self._start(alike, joint_step, left[:size])
            except Exception:  # one step's trouble is not another's: deadlines pass, and it comes again
                log.exception("%d steps could not begin.", size)
            left = left[size:]

    def _start(self, alike: _LayoutGroup, joint_step: JointStep | None, steps: Sequence[PendingStep]) -> None:
        if joint_step is None:
            self._begin_alone(alike, steps[0])
            return
        joint_step.start(steps, PATIENCE_SHARE * min(joining.step.deadline_s for joining in steps))
        self.joined_steps += len(steps)
        for joining in steps:
            alike.policy.began(joining.client.place, time.monotonic(), together=True)

    def _begin_alone(self, alike: _LayoutGroup, coming: PendingStep) -> None:
        coming.client.begin(coming.step, self._wait_s)
        alike.policy.began(coming.client.place, time.monotonic(), together=False)

    @staticmethod
    def _drop(alike: _LayoutGroup, client: Client) -> None:
        alike.held = [joining for joining in alike.held if joining.client is not client]

    def _parted(self, alike: _LayoutGroup, client: Client) -> bool:
        """Whether it is in no step of a joint step any more. While that is waited for, others begin theirs."""
        return all(joint_step.part(client, lambda: self._changed.wait(_RECHECK_S)) for joint_step in alike.joint_steps)

    def _watch(self) -> None:
        """Those that did not come are waited for no longer."""
        with self._changed:
            while not self._closed:
                untils = [alike.until for alike in self._alike.values() if alike.held]
                self._changed.wait(max(0.0, min(untils) - time.monotonic()) if untils else None)
                for alike in list(self._alike.values()):
                    self._look(alike)

    def _build(self) -> None:
        """Make joint steps that are missing, one after the other, while steps run."""
        assert self._make is not None
        while (wanted := self._wanted()) is not None:
            layout, members = wanted
            joint_step = None
            try:
                joint_step = self._make(layout, members)
            except (ExpertMeshError, RuntimeError) as error:
                log.warning("Steps of %d attention workers cannot run as one: %s", members, error)
            except Exception:  # the thread's boundary: steps run alone, other joint steps are made
                log.exception("Steps of %d attention workers cannot run as one.", members)
            with self._changed:
                alike = self._alike.get(layout)
                if alike is None or self._closed:
                    if joint_step is not None:
                        joint_step.close()
                elif joint_step is None:
                    alike.refused.add(members)
                else:
                    alike.joint_steps = tuple(sorted((*alike.joint_steps, joint_step), key=lambda one: one.members))

    def _wanted(self) -> tuple[Layout, int] | None:
        """Waits for one to be wanted; None once closed."""
        with self._changed:
            while not self._closed:
                for layout, alike in self._alike.items():
                    if (members := alike.missing()) is not None:
                        return layout, members
                self._changed.wait()
            return None


def _joint_step_for(joint_steps: Sequence[JointStep], steps: Sequence[PendingStep]) -> tuple[JointStep | None, int]:
    """The smallest joint step that takes as many of ``steps``, from the first on, as any does; how many. None: one
    alone.
    """
    for size in range(len(steps), 1, -1):
        for joint_step in joint_steps:
            if joint_step.fits(steps[:size]):
                return joint_step, size
    return None, 1
