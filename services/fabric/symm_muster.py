"""Begins the steps of a seat's guests, alone or together."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from moe_kernels.exchange_layout import Layout
from services.fabric.symm_team import Guest, Joining, Team
from services.fabric.symm_tempo import Tempo
from services.fabric.symm_wire import Step

log = logging.getLogger(__name__)


class Soldier(Guest, Protocol):
    """A guest. ``place``: its number among those of the seat."""

    @property
    def place(self) -> int: ...

    @property
    def layout(self) -> Layout: ...

    def begin(self, step: Step, wait_s: float) -> None:
        """Its own steps, alone."""
        ...


class Muster:
    """From any thread. ``wait_s``: how long a started step waits for rows."""

    def __init__(self, wait_s: float) -> None:
        self._wait_s = wait_s
        self._changed = threading.Condition()
        self._tempo = Tempo()
        self._teams: dict[Layout, tuple[Team, ...]] = {}
        self._held: list[tuple[Soldier, Step]] = []
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

    def begin(self, guest: Soldier, step: Step) -> None:
        """Begin its step: at once, or when those have come that it is to run with."""
        with self.without(guest) as free:
            if not free:
                log.error("A step of guest %d cannot begin: a call with its rows did not end.", guest.place)
                return
            hold = None
            if step.micro_batches == 1 and guest.layout in self._teams:
                hold = self._tempo.begin(guest.place, step.bucket, time.monotonic())
            if hold is None or (self._held and self._held[0][0].layout != guest.layout):
                guest.begin(step, self._wait_s)
                return
            if not self._held:
                self._awaited, self._until = set(hold.places), time.monotonic() + hold.seconds
            self._held.append((guest, step))
            self._awaited.discard(guest.place)
            self._look()

    @contextmanager
    def without(self, guest: Soldier) -> Iterator[bool]:
        """Nothing else begins meanwhile, and ``guest`` is in no step of a team: False if that could not be had."""
        with self._changed:
            self._held = [held for held in self._held if held[0] is not guest]
            parted = [team.part(guest) for team in self._teams.get(guest.layout, ())]
            yield all(parted)

    def leave(self, guest: Soldier) -> bool:
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
                self._look()

    def _look(self) -> None:
        if not self._held:
            return
        if self._awaited and time.monotonic() < self._until:
            self._changed.notify_all()
            return
        held, self._held = self._held, []
        steps = [Joining(guest, step) for guest, step in held]
        fitting = [team for team in self._teams[held[0][0].layout] if len(held) > 1 and team.fits(steps)]
        if fitting:
            min(fitting, key=lambda team: team.members).start(steps)
            self.joined_steps += len(steps)
            return
        for guest, step in held:
            guest.begin(step, self._wait_s)
