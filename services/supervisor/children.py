"""Starts the processes of one supervisor, keeps them alive, watches them, and stops them role by role."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable, Coroutine, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from services.config import ATTENTION, COLOCATED, EXPERTS, GATEWAY, SCHEDULER, Role, Settings
from services.runtime import FORCED
from services.runtime.tasks import first_done
from services.supervisor.child import Child, Outlook, RoleProcess, Running
from services.supervisor.policy import RestartPolicy

COMMANDS: Mapping[Role, Sequence[str]] = {
    role: ("-m", "expertmesh", role) for role in (GATEWAY, SCHEDULER, ATTENTION, COLOCATED, EXPERTS)
}
"""What Python runs for each role, in the order in which roles are stopped: the gateway drains while others work."""

log = logging.getLogger(__name__)


class Children:
    """The children of one supervisor.

    Args:
        commands: role -> what Python runs for it, in the order of stopping; tests bring others than the real ones.
        stop_margin_s: a child that has not ended so many seconds after it should have is killed.
    """

    def __init__(
        self,
        commands: Mapping[Role, Sequence[str]],
        *,
        new_policy: Callable[[], RestartPolicy],
        stop_margin_s: float,
    ) -> None:
        self._commands = commands
        self._new_policy = new_policy
        self._stop_margin_s = stop_margin_s
        self._children: list[tuple[Role | None, Child]] = []
        self._forced = False

    async def start(
        self, name: str, process: Running, role: Role | None = None, *, outlook: Outlook | None = None
    ) -> None:
        """Start ``process`` and watch it. With ``role`` None it is stopped last, because all others need it."""
        child = Child(name, process, self._new_policy(), outlook=outlook)
        self._children.append((role, child))
        await child.start()

    async def start_role(self, name: str, role: Role, config: Path, *, outlook: Outlook) -> None:
        """Start a process for ``role`` with the settings in ``config``, and watch it."""
        # -P: a folder named expertmesh in the working directory must not be imported instead of ours.
        command = [sys.executable, "-P", *self._commands[role], "--config", str(config)]
        await self.start(name, RoleProcess(name, command, os.environ, outlook.on_end), role, outlook=outlook)

    def well_others(self, name: str, *roles: Role) -> int:
        """Return how many children of ``roles`` other than ``name`` did not fail too often of late."""
        return sum(child.well for role, child in self._children if role in roles and child.name != name)

    def pid(self, name: str) -> int | None:
        """Return the process id of the child called ``name`` while it runs."""
        return next((child.pid for _, child in self._children if child.name == name), None)

    def restart(self, name: str) -> None:
        """Kill the child called ``name``; it is started again."""
        for _, child in self._children:
            if child.name == name:
                child.restart()

    async def watch(self, stop: asyncio.Event, side_work: Coroutine[Any, Any, object]) -> int:
        """Return 0 after ``stop``, or the exit code of the first child that could not be kept alive.

        ``side_work`` runs meanwhile; an error that it raises ends the watch, too.
        """

        async def side() -> None:
            await side_work
            await stop.wait()

        kept = (_kept_alive(child) for _, child in self._children)
        stopped, _, *codes = await first_done(stop.wait(), side(), *kept)
        return 0 if stopped else next(code for code in codes if code is not None)

    async def stop(self, settings: Settings) -> None:
        """Stop the children role by role, in the order of the commands; last those that all others need."""
        order: Iterable[Role | None] = (*self._commands, None)
        for role in order:
            timeout_s = _drain_s(role, settings) + self._stop_margin_s
            of_role = [child for its, child in self._children if its == role]
            await asyncio.gather(*(child.stop(timeout_s) for child in of_role))

    def exit_code(self, code: int) -> int:
        """Return ``code``, or FORCED where the children were killed."""
        return FORCED if self._forced else code

    def kill(self) -> None:
        """End all at once, for good; :meth:`stop` then returns soon."""
        self._forced = True
        for _, child in self._children:
            child.kill()


async def _kept_alive(child: Child) -> int:
    code = await child.keep_alive()
    log.error("%s failed (exit code %d, see above) and will not be restarted; shutting down", child.name, code)
    return code


def _drain_s(role: Role | None, settings: Settings) -> float:
    """Return how long a role may take to end. Seats wait until no table lists them, then until calls are answered."""
    if role is None or role == SCHEDULER:
        return 0.0
    drains = {COLOCATED: 3, EXPERTS: 2}.get(role, 1)
    return drains * settings.drain_timeout + (settings.drain_delay if role == GATEWAY else 0.0)
