"""What is scaled, how many of it there are, and within which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Protocol

import msgspec

from services.config import Settings

ScaledRole = Literal["experts", "attention", "gateway"]


@dataclass(frozen=True, slots=True)
class Target:
    """One number that is decided: replicas of a shard group (``shard`` is its number), or of a whole role (None)."""

    role: ScaledRole
    shard: int | None = None

    @property
    def label(self) -> str:
        """``shard`` as a series has it."""
        return "" if self.shard is None else str(self.shard)

    @property
    def name(self) -> str:
        return self.role if self.shard is None else f"{self.role}/{self.shard}"

    @property
    def sleeps(self) -> bool:
        """Whether it goes with the model. Gateways stay: they take the request that wakes it."""
        return self.role != "gateway"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """``wanted`` is what whoever starts replicas was told last, ``ready`` how many of them serve."""

    wanted: int
    ready: int


class ReplicaCounts(Protocol):
    """Who knows what was asked for and not only what is there."""

    def counts(self) -> Mapping[Target, Replicas] | None:
        """By target; None: not known (any more), then what is registered in Redis stands in. Must not block."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Fewest replicas while the model is awake, and most."""

    fewest: int
    most: int

    def clamp(self, replicas: int) -> int:
        return max(self.fewest, min(self.most, replicas))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """What an operator sets. Times in seconds."""

    bounds: Mapping[ScaledRole, Bounds]
    """Those of ``experts`` hold for each shard group without its own."""
    shards: Mapping[int, Bounds] = field(default_factory=dict)
    """Shard groups with bounds of their own."""
    sleep_after_s: float = 0.0
    """Without requests; 0: the model never sleeps."""
    down_after_s: float = 120.0
    """For so long fewer replicas must have sufficed before there are fewer."""
    ranks: int = 1
    """Attention workers that come and go together: that many are one replica."""
    groups: int | None = None
    """Shard groups whose seats are the ``ranks`` workers of each replica of attention, in turn, and nowhere else; None:
    experts are targets of their own."""

    def bounds_of(self, target: Target) -> Bounds:
        own = None if target.shard is None else self.shards.get(target.shard)
        return own or self.bounds[target.role]

    @classmethod
    def of(cls, settings: Settings) -> ScalingOptions:
        return cls(
            bounds={
                "experts": Bounds(fewest=settings.min_replicas, most=settings.max_replicas),
                "attention": Bounds(fewest=settings.min_attention, most=settings.max_attention),
                "gateway": Bounds(fewest=settings.min_gateways, most=settings.max_gateways),
            },
            shards={shard: Bounds(fewest=few, most=many) for shard, (few, many) in settings.shard_bounds().items()},
            sleep_after_s=settings.sleep_after,
            down_after_s=settings.scale_down_after,
            ranks=settings.workers if settings.layout in ("colocated", "lockstep") else 1,
            groups=settings.expert_groups or 1 if settings.layout == "colocated" else None,
        )

    def decides(self, target: Target) -> bool:
        """Whether it is wanted by itself."""
        return self.groups is None or target.role != "experts"

    def seats_of(self, group: int) -> float:
        """In each replica of attention. Where a replica has not all groups: on average."""
        assert self.groups is not None, "asked of replicas with seats alone"
        if self.ranks < self.groups:
            return self.ranks / self.groups
        return self.ranks // self.groups + (group < self.ranks % self.groups)


_RANKS = "ranks"
"""Beside the targets: what one of attention is, where that is not one worker."""


def pack_targets(targets: Mapping[Target, int], ranks: int) -> bytes:
    """As a leader keeps them for its successor: JSON, readable for an operator too."""
    unit = {} if ranks == 1 else {_RANKS: ranks}
    return msgspec.json.encode({target.name: wanted for target, wanted in targets.items()} | unit)


def unpack_targets(kept: bytes | None, ranks: int) -> dict[Target, int]:
    """Nothing where ``kept`` is of a version that is not understood; nothing of attention where its unit is another."""
    try:
        read = msgspec.json.decode(kept or b"{}", type=dict[str, int])
        unit = read.pop(_RANKS, 1)
        found = {_target(name): wanted for name, wanted in read.items()}
    except (msgspec.MsgspecError, ValueError):
        return {}
    return {target: wanted for target, wanted in found.items() if target.role != "attention" or unit == ranks}


def _target(name: str) -> Target:
    role, _, shard = name.partition("/")
    return Target(msgspec.convert(role, ScaledRole), int(shard) if shard else None)
