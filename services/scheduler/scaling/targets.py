"""What is scaled, how many of it there are, and within which bounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, Protocol

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
    """Those of ``experts`` hold for each shard group."""
    sleep_after_s: float = 0.0
    """Without requests; 0: the model never sleeps."""
    target_ttft_s: float = 2.0
    target_tpot_s: float = 0.1

    @classmethod
    def of(cls, settings: Settings) -> ScalingOptions:
        return cls(
            bounds={
                "experts": Bounds(fewest=settings.fewest_replicas, most=settings.most_replicas),
                "attention": Bounds(fewest=settings.fewest_attention, most=settings.most_attention),
                "gateway": Bounds(fewest=settings.fewest_gateways, most=settings.most_gateways),
            },
            sleep_after_s=settings.sleep_after,
            target_ttft_s=settings.target_ttft,
            target_tpot_s=settings.target_tpot,
        )
