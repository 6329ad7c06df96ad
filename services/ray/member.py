"""One actor of an application, as its controller knows it."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field
from typing import Any

from services.ray.keeper import Report

NO_ROOM_S = 5.0
"""An actor that has not reported for so long waits for room."""


@dataclass(slots=True, eq=False)
class Member:
    """An actor. ``said`` is its last report, ``restarts`` how often Ray has started it again as far as was seen,
    ``sent_to`` the node that it was meant for, and ``since`` when it was asked for. ``gone``: it does not answer right
    now. ``ended``: why it has ended for good."""

    name: str
    handle: Any
    sent_to: str = ""
    since: float = field(default_factory=time.monotonic)
    said: Report | None = None
    asking: asyncio.Task[None] | None = None
    leaving: asyncio.Task[None] | None = None
    gone: bool = False
    ended: str | None = None
    restarts: int = 0
    failed_at: float | None = None

    @property
    def unit(self) -> str:
        """Name of the unit."""
        return self.name.partition("@")[0]

    @property
    def digest(self) -> str:
        """Of what the actor was started with."""
        return self.name.partition("@")[2]

    @property
    def waits(self) -> bool:
        """Whether it has not begun for so long that it must be waiting for room."""
        return self.said is None and self.since < time.monotonic() - NO_ROOM_S

    @property
    def ready(self) -> bool:
        """Whether the process said last that it serves."""
        return self.said is not None and self.said.state == "ready" and not self.gone

    @property
    def node(self) -> str:
        """Id of the node on which the actor runs or was meant to run."""
        return self.said.node if self.said is not None else self.sent_to

    @property
    def state(self) -> str:
        """In a word, for operators."""
        if self.leaving is not None:
            return "leaving"
        if self.ended is not None:
            return "failed"
        if self.gone:
            return "died"
        return self.said.state if self.said is not None else "waiting"


def row(name: str, member: Member | None, failure: str) -> dict[str, Any]:
    """Return what `expertmesh ray status` shows of the member called ``name``, None where it is not there yet.
    ``failure``: why it failed last."""
    said = member.said if member is not None else None
    state = member.state if member is not None else "waiting"
    waits_for = said.waits_for if said is not None else ""
    return {
        "unit": name.partition("@")[0],
        "state": state,
        "waits_for": waits_for or (failure if state != "ready" else ""),
        "node": f"{said.address}/{said.node[:8]}" if said is not None else "",
        "pid": said.pid if said is not None else None,
        "starts": said.starts if said is not None else 0,
        "restarts": member.restarts if member is not None else 0,
        "log": said.log if said is not None else "",
    }
