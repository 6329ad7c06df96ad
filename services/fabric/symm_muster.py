"""Begins the steps of a seat's guests: alone at once, or when those have come that they are to run with."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from moe_kernels.exchange_layout import Layout
from services.fabric.symm_team import Guest, Joining, Team
from services.fabric.symm_tempo import Tempo
from services.fabric.symm_wire import Step

log = logging.getLogger(__name__)

_RECHECK_S = 0.0002


class Muster:
    """From any thread. ``wait_s``: how long a started step waits for rows; ``hold_s``: one that is held, at most, for
    others to come."""

    def __init__(self, wait_s: float, hold_s: float) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._tempo = Tempo(hold_s)
        self._teams: dict[Layout, tuple[Team, ...]] = {}
        self._held: list[Joining] = []
        self._awaited: set[int] = set()
        self._until = 0.0
        self._closed = False
        self.joined_steps = 0
        self._enlisting = threading.Lock()
        threading.Thread(target=self._watch, name="symm muster", daemon=True).start()

    @property
    def seconds(self) -> float:
        """That steps of teams computed."""
        return sum(team.seconds for teams in self._teams.values() for team in teams)

    def idle(self) -> bool:
        with self._changed:
            return not self._held and all(team.idle() for teams in self._teams.values() for team in teams)

    @contextmanager
    def enlisting(self, layout: Layout, members: int) -> Iterator[bool]:
        """Whether there is no team of that size yet; nobody else makes one meanwhile."""
        with self._enlisting:
            yield all(team.members < members for team in self._teams.get(layout, ()))

    def enlist(self, layout: Layout, team: Team) -> None:
        with self._changed:
            self._teams = {**self._teams, layout: (*self._teams.get(layout, ()), team)}

    def begin(self, guest: Guest, step: Step) -> None:
        """Begin its step: at once, or when those have come that it is to run with."""
        with self.without(guest) as free:
            if not free:
                log.error("A step of guest %d cannot begin: a call with its rows did not end.", guest.place)
                return
            if step.micro_batches > 1 or guest.layout not in self._teams:
                guest.begin(step, self._wait_s)
                return
            coming, now = Joining(guest, step), time.monotonic()
            hold = self._tempo.come(guest.place, step.bucket, now)
            if hold is None or (self._held and self._held[0].guest.layout != guest.layout):
                self._begin_alone(coming)
                return
            if not self._held:
                self._awaited, self._until = set(hold.places), now + hold.seconds
            self._held.append(coming)
            self._awaited.discard(guest.place)
            self._look()

    @contextmanager
    def without(self, guest: Guest) -> Iterator[bool]:
        """Nothing begins meanwhile, and ``guest`` is in no step of a team: False if that could not be had. While that
        is waited for, others begin theirs."""
        with self._changed:
            self._held = [held for held in self._held if held.guest is not guest]
            parted = [
                team.part(guest, lambda: self._changed.wait(_RECHECK_S)) for team in self._teams.get(guest.layout, ())
            ]
            yield all(parted)

    def leave(self, guest: Guest) -> bool:
        """Whether no team uses its memory any more."""
        with self.without(guest) as free:
            self._tempo.leave(guest.place)
            self._awaited.discard(guest.place)
            self._look()
        return free

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        for teams in self._teams.values():
            for team in teams:
                team.close()

    def _watch(self) -> None:
        """Those that did not come are waited for no longer."""
        with self._changed:
            while not self._closed:
                self._changed.wait(max(0.0, self._until - time.monotonic()) if self._held else None)
                try:
                    self._look()
                except Exception:  # the thread's boundary: those steps' deadlines pass, others go on
                    log.exception("Steps that were held could not begin.")

    def _look(self) -> None:
        """Begin what is held, once there is nobody left to wait for, or no time."""
        if not self._held:
            return
        if self._awaited and time.monotonic() < self._until:
            self._changed.notify_all()
            return
        held, self._held = self._held, []
        fitting = [team for team in self._teams[held[0].guest.layout] if len(held) > 1 and team.fits(held)]
        if not fitting:
            for coming in held:
                self._begin_alone(coming)
            return
        min(fitting, key=lambda team: team.members).start(held)
        self.joined_steps += len(held)
        for coming in held:
            self._tempo.began(coming.guest.place, time.monotonic(), together=True)

    def _begin_alone(self, coming: Joining) -> None:
        coming.guest.begin(coming.step, self._wait_s)
        self._tempo.began(coming.guest.place, time.monotonic(), together=False)
