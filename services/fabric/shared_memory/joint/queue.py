"""Begins the steps of a seat's guests: alone at once, or when those have come that they are to run with."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from moe_kernels.exchange.layout import MOST_MEMBERS, Layout
from services.errors import ExpertMeshError, WireError
from services.fabric.shared_memory.joint.policy import Tempo
from services.fabric.shared_memory.joint.steps import Guest, Joining, Team
from services.fabric.shared_memory.messages import Step

log = logging.getLogger(__name__)

HOLD_SHARE, PATIENCE_SHARE = 0.3, 0.4
"""Of the time that an attention worker waits for an answer: how long its step is held, at most, and how long it then
waits in a layer for the rows of others; the rest is for the call."""
_RECHECK_S = 0.0002


@dataclass(slots=True)
class _Alike:
    """Guests with memory of one layout. ``held``: steps that have come, until those of ``awaited`` places come, or the
    time does."""

    tempo: Tempo = field(default_factory=Tempo)
    guests: list[Guest] = field(default_factory=list)
    teams: tuple[Team, ...] = ()
    refused: set[int] = field(default_factory=set)
    """Sizes of teams that could not be made."""
    held: list[Joining] = field(default_factory=list)
    awaited: set[int] = field(default_factory=set)
    until: float = 0.0

    def missing(self) -> int | None:
        """The smallest size of a team that is wanted and not there."""
        there = {team.members for team in self.teams} | self.refused
        size = 2
        while size <= MOST_MEMBERS and size < 2 * len(self.guests):
            if size not in there:
                return size
            size *= 2
        return None


class Muster:
    """From any thread.

    Args:
        make: a team of so many for guests of a layout, in a thread for that; None: steps run alone.
        wait_s: how long a started step waits for rows.
    """

    def __init__(self, make: Callable[[Layout, int], Team] | None, wait_s: float) -> None:
        self._make, self._wait_s = make, wait_s
        self._changed = threading.Condition()
        self._alike: dict[Layout, _Alike] = {}
        self._closed = False
        self._of_the_gone_s = 0.0
        self.joined_steps = 0
        if make is not None:
            for work, name in ((self._watch, "symm muster"), (self._build, "symm teams")):
                threading.Thread(target=work, name=name, daemon=True).start()

    @property
    def seconds(self) -> float:
        """That steps of teams computed."""
        with self._changed:
            return self._of_the_gone_s + sum(team.seconds for alike in self._alike.values() for team in alike.teams)

    def idle(self) -> bool:
        with self._changed:
            return all(not alike.held and all(team.idle() for team in alike.teams) for alike in self._alike.values())

    def enter(self, guest: Guest) -> None:
        """Its own steps are prepared. Teams are made while it is served already."""
        with self._changed:
            self._alike.setdefault(guest.layout, _Alike()).guests.append(guest)
            self._changed.notify_all()

    def begin(self, guest: Guest, step: Step) -> None:
        """Begin its step: at once, or when those have come that it is to run with.

        Raises:
            WireError: it has not entered; its last step is still being computed with others', after ``wait_s``.
        """
        with self._changed:
            alike, coming, now = self._of(guest), Joining(guest, step), time.monotonic()
            self._drop(alike, guest)
            if not self._parted(alike, guest):
                raise WireError(f"A step of guest {guest.place} cannot begin: a call with its rows did not end.")
            awaited = guest.place in alike.awaited
            alike.awaited.discard(guest.place)
            may_join = alike.teams and step.whole and step.micro_batches == 1
            if not may_join:
                alike.tempo.rest(guest.place)
            if not may_join or not self._hold(alike, coming, now, awaited=awaited):
                self._begin_alone(alike, coming)
            self._look(alike)

    def stop(self, guest: Guest, give_up: Callable[[], None]) -> None:
        """No more rows come of the step that it began last, which has failed. Waits for no call."""
        with self._changed:
            alike = self._of(guest)
            self._drop(alike, guest)
            for team in alike.teams:
                if team.was_late(guest):
                    seconds = alike.tempo.failed(guest.place, time.monotonic())
                    log.warning("Guest %d was late in a step with others: alone for %g s.", guest.place, seconds)
                team.leave_out(guest)
            give_up()
            self._look(alike)

    def leave(self, guest: Guest) -> bool:
        """Whether no team uses its memory any more, which is waited for."""
        with self._changed:
            alike = self._alike.get(guest.layout)
            if alike is None or guest not in alike.guests:
                return True
            self._drop(alike, guest)
            parted = self._parted(alike, guest)
            alike.tempo.leave(guest.place)
            alike.guests.remove(guest)
            alike.awaited.discard(guest.place)
            self._look(alike)
            if not alike.guests:
                del self._alike[guest.layout]
                self._of_the_gone_s += sum(team.seconds for team in alike.teams)
                for team in alike.teams:
                    team.close()
            return parted

    def close(self) -> None:
        """Begin nothing any more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
            for alike in self._alike.values():
                for team in alike.teams:
                    team.close()
                alike.teams = ()

    def _of(self, guest: Guest) -> _Alike:
        alike = self._alike.get(guest.layout)
        if alike is None or guest not in alike.guests:
            raise WireError(f"Guest {guest.place} has no part in steps yet.")
        return alike

    def _hold(self, alike: _Alike, coming: Joining, now: float, *, awaited: bool) -> bool:
        """Whether it waits, for others or with those that did for it."""
        hold = alike.tempo.come(coming.guest.place, coming.step.bucket, now, HOLD_SHARE * coming.step.deadline_s)
        if hold is None or not (hold.places or awaited):
            return False
        if alike.held:
            alike.until = min(alike.until, now + HOLD_SHARE * coming.step.deadline_s)
        else:
            alike.awaited, alike.until = set(hold.places), now + hold.seconds
        alike.held.append(coming)
        return True

    def _look(self, alike: _Alike) -> None:
        """Begin what is held, once there is nobody left to wait for, or no time."""
        if not alike.held:
            return
        if alike.awaited and time.monotonic() < alike.until:
            self._changed.notify_all()
            return
        left, alike.held = sorted(alike.held, key=lambda joining: -joining.step.bucket), []
        while left:
            team, size = _team_for(alike.teams, left)
            try:
                self._start(alike, team, left[:size])
            except Exception:  # one step's trouble is not another's: deadlines pass, and it comes again
                log.exception("%d steps could not begin.", size)
            left = left[size:]

    def _start(self, alike: _Alike, team: Team | None, steps: Sequence[Joining]) -> None:
        if team is None:
            self._begin_alone(alike, steps[0])
            return
        team.start(steps, PATIENCE_SHARE * min(joining.step.deadline_s for joining in steps))
        self.joined_steps += len(steps)
        for joining in steps:
            alike.tempo.began(joining.guest.place, time.monotonic(), together=True)

    def _begin_alone(self, alike: _Alike, coming: Joining) -> None:
        coming.guest.begin(coming.step, self._wait_s)
        alike.tempo.began(coming.guest.place, time.monotonic(), together=False)

    @staticmethod
    def _drop(alike: _Alike, guest: Guest) -> None:
        alike.held = [joining for joining in alike.held if joining.guest is not guest]

    def _parted(self, alike: _Alike, guest: Guest) -> bool:
        """Whether it is in no step of a team any more. While that is waited for, others begin theirs."""
        return all(team.part(guest, lambda: self._changed.wait(_RECHECK_S)) for team in alike.teams)

    def _watch(self) -> None:
        """Those that did not come are waited for no longer."""
        with self._changed:
            while not self._closed:
                untils = [alike.until for alike in self._alike.values() if alike.held]
                self._changed.wait(max(0.0, min(untils) - time.monotonic()) if untils else None)
                for alike in list(self._alike.values()):
                    self._look(alike)

    def _build(self) -> None:
        """Make teams that are missing, one after the other, while steps run."""
        assert self._make is not None
        while (wanted := self._wanted()) is not None:
            layout, members = wanted
            team = None
            try:
                team = self._make(layout, members)
            except (ExpertMeshError, RuntimeError) as error:
                log.warning("Steps of %d attention workers cannot run as one: %s", members, error)
            except Exception:  # the thread's boundary: steps run alone, other teams are made
                log.exception("Steps of %d attention workers cannot run as one.", members)
            with self._changed:
                alike = self._alike.get(layout)
                if alike is None or self._closed:
                    if team is not None:
                        team.close()
                elif team is None:
                    alike.refused.add(members)
                else:
                    alike.teams = tuple(sorted((*alike.teams, team), key=lambda one: one.members))

    def _wanted(self) -> tuple[Layout, int] | None:
        """Waits for one to be wanted; None once closed."""
        with self._changed:
            while not self._closed:
                for layout, alike in self._alike.items():
                    if (members := alike.missing()) is not None:
                        return layout, members
                self._changed.wait()
            return None


def _team_for(teams: Sequence[Team], steps: Sequence[Joining]) -> tuple[Team | None, int]:
    """The smallest team that takes as many of ``steps``, from the first on, as any does; how many. None: one alone."""
    for size in range(len(steps), 1, -1):
        for team in teams:
            if team.fits(steps[:size]):
                return team, size
    return None, 1
