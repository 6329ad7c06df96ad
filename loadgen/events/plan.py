"""Events as words of the command line: ``30s:kill:experts-1`` in, :class:`Planned` out."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final, Literal, get_args

from loadgen.errors import BadSetting

Action = Literal["kill", "drain", "pause", "scale", "run"]
FORMS: Final = (
    "AT:kill:NAME",
    "AT:drain:NAME",
    "AT:pause:NAME=SECONDS",
    "AT:scale:NAME=REPLICAS",
    "AT:run:COMMAND",
)
_ACTIONS: Final[dict[str, Action]] = {action: action for action in get_args(Action)}
_UNITS: Final = {"ms": 1e-3, "s": 1.0, "m": 60.0, "h": 3600.0, "": 1.0}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)(ms|s|m|h|)")


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """``action`` on ``target`` (a process, a pod, a workload, or a command of the shell), ``at_s`` seconds after the
    load's beginning. ``replicas``: of scale; ``for_s``: of pause."""

    at_s: float
    action: Action
    target: str
    replicas: int = 0
    for_s: float = 0.0

    @property
    def text(self) -> str:
        """The target with what is done to it in numbers."""
        if self.action == "scale":
            return f"{self.target}={self.replicas}"
        return f"{self.target}={self.for_s:g}s" if self.action == "pause" else self.target


def planned(text: str) -> Planned:
    """Returns the event that ``text`` describes.

    >>> planned("1m:scale:attention=3").text, planned("250ms:run:tc qdisc del dev lo root").at_s
    ('attention=3', 0.25)

    Raises:
        BadSetting: it has none of :data:`FORMS`.
    """
    at, _, rest = text.partition(":")
    word, _, target = rest.partition(":")
    action = _ACTIONS.get(word)
    if action is None or not target.strip():
        raise BadSetting(f"--event {text} is no event.", hint=f"Write {', '.join(FORMS)}.")
    at_s = _seconds(at, text)
    name, _, amount = target.rpartition("=")
    if action == "scale":
        if not name or not amount.isdecimal():
            raise BadSetting(f"--event {text} does not say how many replicas.", hint=f"Write {FORMS[3]}.")
        return Planned(at_s=at_s, action=action, target=name, replicas=int(amount))
    if action == "pause":
        if not name:
            raise BadSetting(f"--event {text} does not say for how long.", hint=f"Write {FORMS[2]}.")
        return Planned(at_s=at_s, action=action, target=name, for_s=_seconds(amount, text))
    return Planned(at_s=at_s, action=action, target=target)


def _seconds(text: str, event: str) -> float:
    found = _DURATION.fullmatch(text)
    if found is None:
        raise BadSetting(f"--event {event}: {text!r} is no time.", hint="Write 30, 30s, 1.5m or 500ms.")
    return float(found[1]) * _UNITS[found[2]]
