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
    """What has its own number of replicas: the shard group with number ``shard``, or a whole role (None)."""

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
        """Whether the target sleeps with the model. Gateways stay: they take the request that wakes it."""
        return self.role != "gateway"


@dataclass(frozen=True, kw_only=True, slots=True)
class Replicas:
    """``wanted`` is the number that is set for whoever starts replicas, ``ready`` how many of them serve."""

    wanted: int
    ready: int


class ReplicaCounts(Protocol):
    """A source that knows which replicas are set, not only which are registered."""

    def counts(self) -> Mapping[Target, Replicas] | None:
        """Return replicas by target without blocking. None: they are unknown; what is registered in Redis counts."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """Limits of a target's replicas; the minimum holds while the model is awake."""

    minimum: int
    maximum: int

    def clamp(self, replicas: int) -> int:
        return max(self.minimum, min(self.maximum, replicas))


@dataclass(frozen=True, kw_only=True, slots=True)
class ScalingOptions:
    """What an operator sets. Times in seconds."""

    bounds: Mapping[ScaledRole, Bounds]
    """Bounds by role; ``experts`` has those of each shard group without bounds of its own."""
    shards: Mapping[int, Bounds] = field(default_factory=dict)
    """Shard groups with bounds of their own."""
    sleep_after_s: float = 0.0
    """Time without requests after which the model sleeps; 0: it never does."""
    down_after_s: float = 120.0
    """Time for which fewer replicas must have sufficed before fewer are wanted."""
    ranks: int = 1
    """Attention workers that are one replica: they come and go together."""
    groups: int | None = None
    """Shard groups whose only seats are the ``ranks`` workers of each replica of attention, in turn. None: experts are
    targets of their own."""

    def bounds_of(self, target: Target) -> Bounds:
        own = None if target.shard is None else self.shards.get(target.shard)
        return own or self.bounds[target.role]

    @classmethod
    def of(cls, settings: Settings) -> ScalingOptions:
        return cls(
            bounds={
                "experts": Bounds(minimum=settings.min_replicas, maximum=settings.max_replicas),
                "attention": Bounds(minimum=settings.min_attention, maximum=settings.max_attention),
                "gateway": Bounds(minimum=settings.min_gateways, maximum=settings.max_gateways),
            },
            shards={shard: Bounds(minimum=low, maximum=high) for shard, (low, high) in settings.shard_bounds().items()},
            sleep_after_s=settings.sleep_after,
            down_after_s=settings.scale_down_after,
            ranks=settings.workers if settings.layout in ("colocated", "lockstep") else 1,
            groups=settings.expert_groups or 1 if settings.layout == "colocated" else None,
        )

    def decides(self, target: Target) -> bool:
        """Say whether ``target`` has a number of its own."""
        return self.groups is None or target.role != "experts"

    def seats_of(self, group: int) -> float:
        """Return the seats of ``group`` per replica of attention; the mean if a replica does not have all groups."""
        assert self.groups is not None, "only replicas with seats have them"
        if self.ranks < self.groups:
            return self.ranks / self.groups
        return self.ranks // self.groups + (group < self.ranks % self.groups)


_RANKS = "ranks"
"""Key for the workers of a replica of attention, where that is not one; stored with the targets."""


def pack_targets(targets: Mapping[Target, int], ranks: int) -> bytes:
    """Return ``targets`` as JSON, for the next leader and for operators."""
    unit = {} if ranks == 1 else {_RANKS: ranks}
    return msgspec.json.encode({target.name: wanted for target, wanted in targets.items()} | unit)


def unpack_targets(kept: bytes | None, ranks: int) -> dict[Target, int]:
    """Return the targets in ``kept``: none if its format is unknown, none of attention if it counts other replicas."""
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
