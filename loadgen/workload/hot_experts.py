"""Prompts that make given experts hot, chosen by what a router did with them when it was recorded.

A recording is JSON: {"counts": {name: [[rows of each expert] of each layer]}, "prompts": {name: [prompt, ...]}}. A name
is a prompt, or a topic of many. ``expertmesh-load record`` makes one with the reference model of a checkpoint;
``loadgen/day/pocket-routing.json`` has the counts of the pocket model's topics, without prompts: a file of prompts
with their topics completes it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import msgspec

from loadgen.errors import BadSetting, FileUnusable
from loadgen.workload.conversation import Conversation, Turn

Expert = tuple[int, int]
"""A layer and an expert, both from 0 on."""


class Recording(msgspec.Struct, frozen=True):
    counts: dict[str, list[list[float]]]
    prompts: dict[str, list[str]] = {}


def read_recording(path: Path) -> Recording:
    """Returns what a router did.

    Raises:
        FileUnusable: there is no such file, or it has another form.
    """
    try:
        return msgspec.json.decode(path.expanduser().read_bytes(), type=Recording)
    except OSError as error:
        raise FileUnusable(f"Cannot read the recording {path}: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise FileUnusable(f"{path} is no recording: {error}.", hint="`expertmesh-load record` makes one.") from error


def parse_experts(text: str) -> list[Expert]:
    """Returns the experts of a setting, ``LAYER:EXPERT,LAYER:EXPERT``.

    Raises:
        BadSetting: it is none.
    """
    try:
        return [(int(layer), int(expert)) for layer, _, expert in (part.partition(":") for part in text.split(","))]
    except ValueError as error:
        raise BadSetting(
            f"{text!r} names no experts.", hint="Write LAYER:EXPERT,LAYER:EXPERT, both from 0 on."
        ) from error


def shares(recording: Recording, experts: Sequence[Expert]) -> dict[str, float]:
    """Returns how often each name's rows went to one of ``experts``, of its rows in their layers.

    Raises:
        BadSetting: there is no such expert.
    """
    found = {}
    for name, counts in recording.counts.items():
        for layer, expert in experts:
            if not (0 <= layer < len(counts) and 0 <= expert < len(counts[layer])):
                layers = f"{len(counts)} layers of {len(counts[0])} experts" if counts else "no layers"
                raise BadSetting(f"The recording has no expert {layer}:{expert}.", hint=f"It has {layers}.")
        rows = sum(sum(counts[layer]) for layer in {layer for layer, _ in experts})
        found[name] = sum(counts[layer][expert] for layer, expert in set(experts)) / rows if rows else 0.0
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class HotExperts:
    """The prompts of the names whose rows go to the experts most often, one after the other."""

    kind: ClassVar[str] = "hot experts"
    prompts: Sequence[tuple[str, str]]
    """Name and prompt."""
    output_tokens: int
    text: str

    def conversation(self, number: int) -> Conversation:
        name, prompt = self.prompts[number % len(self.prompts)]
        return Conversation(turns=(Turn(content=prompt, output_tokens=self.output_tokens, name=name),))


def hot_experts(
    recording: Recording,
    experts: Sequence[Expert],
    *,
    keep: int,
    output_tokens: int,
    more_prompts: Mapping[str, Sequence[str]],
) -> HotExperts:
    """Returns the prompts of the ``keep`` hottest names. ``more_prompts``: by name, for names that have none.

    Raises:
        BadSetting: there is no such expert, or no name has prompts.
    """
    by_name = {name: recording.prompts.get(name) or more_prompts.get(name, ()) for name in recording.counts}
    known = {name: share for name, share in shares(recording, experts).items() if by_name[name]}
    if not known:
        names = ", ".join(list(recording.counts)[:5])
        raise BadSetting(
            f"The recording has no prompts of {names}.", hint='Give --prompts FILE with lines of {"prompt", "topic"}.'
        )
    hottest = sorted(known, key=lambda name: -known[name])[:keep]
    mean = sum(known.values()) / len(known)
    best = sum(known[name] for name in hottest) / len(hottest)
    named = ", ".join(f"{layer}:{expert}" for layer, expert in experts)
    text = f"prompts that give experts {named} {best:.1%} of their layers' rows ({mean:.1%} over all prompts)"
    prompts = [(name, prompt) for name in hottest for prompt in by_name[name]]
    return HotExperts(prompts=prompts, output_tokens=output_tokens, text=text)
