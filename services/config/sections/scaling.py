"""Section: autoscaling."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.config.fields import EXPERTS, GATEWAY, SCHEDULER, setting


class ScalingSettings(BaseModel):
    """How many replicas the leading scheduler wants, and what it sees of Kubernetes."""

    autoscale: Literal["off", "on"] = setting(
        "off",
        "whether the leading scheduler says how many replicas it wants (expertmesh_wanted_replicas)",
        roles=(SCHEDULER,),
    )
    sleep_after: float = setting(
        0.0,
        "seconds without requests after which no attention or expert workers are wanted; 0: never",
        roles=(SCHEDULER,),
        ge=0,
        le=31_536_000,
    )
    scale_down_after: float = setting(
        120.0,
        "seconds for which fewer replicas must have sufficed before fewer are wanted",
        roles=(SCHEDULER,),
        ge=0,
        le=86_400,
    )
    target_ttft: float = setting(
        2.0, "seconds to the first token that requests should stay below", roles=(GATEWAY,), gt=0, le=3600
    )
    target_tpot: float = setting(
        0.1,
        "seconds between a request's tokens, on average, that it should stay below",
        roles=(GATEWAY,),
        gt=0,
        le=3600,
    )
    min_replicas: int = setting(
        1, "expert workers wanted of each shard group at least, while awake", roles=(SCHEDULER,), ge=1, le=4096
    )
    max_replicas: int = setting(
        4, "expert workers wanted of each shard group at most", roles=(SCHEDULER,), ge=1, le=4096
    )
    shard_replicas: str = setting(
        "",
        "minimum and maximum of single shard groups instead, such as 0=3:6,2=1:2",
        roles=(SCHEDULER,),
        pattern=r"^(\d{1,4}=[1-9]\d{0,3}:[1-9]\d{0,3}(,\d{1,4}=[1-9]\d{0,3}:[1-9]\d{0,3})*)?$",
    )
    min_attention: int = setting(
        1,
        "attention workers wanted at least, while awake; with layouts colocated and lockstep replicas of --workers",
        roles=(SCHEDULER,),
        ge=1,
        le=4096,
    )
    max_attention: int = setting(
        4, "attention workers, or replicas of --workers, wanted at most", roles=(SCHEDULER,), ge=1, le=4096
    )
    min_gateways: int = setting(1, "gateways wanted at least", roles=(SCHEDULER,), ge=1, le=4096)
    max_gateways: int = setting(4, "gateways wanted at most", roles=(SCHEDULER,), ge=1, le=4096)
    kubernetes_selector: str | None = setting(
        None,
        "labels of this deployment's workloads, as `kubectl get -l` takes them: their replica counts are watched, and "
        "who is about to leave is out of the routing table before (default: Kubernetes is not asked)",
        roles=(SCHEDULER,),
        min_length=1,
    )
    pod: str | None = setting(
        None,
        "name of this worker's pod, by which the scheduler knows who leaves (set by the chart)",
        roles=(EXPERTS,),
        hidden=True,
        min_length=1,
    )

    def shard_bounds(self) -> dict[int, tuple[int, int]]:
        """Returns shard group -> its minimum and maximum of replicas, where it has its own."""
        parts = (part.partition("=") for part in self.shard_replicas.split(",") if part)
        pairs = ((shard, bounds.partition(":")) for shard, _, bounds in parts)
        return {int(shard): (int(low), int(high)) for shard, (low, _, high) in pairs}
