"""All attacks, in the order of the review's findings."""

from __future__ import annotations

from abuse.attack import Attack
from abuse.attacks import access, bodies, garbage, heads, poison, prompts, readers, scores, stalls

_KINDS = (bodies, heads, stalls, scores, prompts, readers, access, garbage, poison)
ATTACKS: list[Attack] = [attack for kind in _KINDS for attack in kind.ATTACKS]
