"""All attacks, in the order of the review's findings."""

from __future__ import annotations

from abuse.attack import Attack
from abuse.attacks import bodies

ATTACKS: list[Attack] = [*bodies.ATTACKS]
