"""Section: autoscaling."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel

from services.config.fields import EXPERTS, GATEWAY, SCHEDULER, setting


class ScalingSettings(BaseModel):
    """How many replicas the leading scheduler wants, and what it sees of Kubernetes."""

    autoscale: Literal["off", "on"] = setting(
        "off",
        "whether the scheduler publishes how many replicas it wants, as the metric expertmesh_wanted_replicas",
        common=True,
        roles=(SCHEDULER,),
    )
    sleep_after: float = setting(
        0.0,
        "seconds without requests after which attention and expert workers are scaled to zero; 0 means never",
        roles=(SCHEDULER,),
        ge=0,
        le=31_536_000,
    )
    scale_down_after: float = setting(
        120.0,
        "seconds for which fewer replicas must have been enough before scaling down",
        roles=(SCHEDULER,),
        ge=0,
        le=86_400,
    )
    target_ttft: float = setting(2.0, "target for the time to first token, in seconds", roles=(GATEWAY,), gt=0, le=3600)
    target_tpot: float = setting(
        0.1,
        "target for the mean time per output token of a request, in seconds",
        roles=(GATEWAY,),
        gt=0,
        le=3600,
    )
    min_replicas: int = setting(
        1,
        "minimum number of expert workers of each shard group while the model is awake",
        roles=(SCHEDULER,),
        ge=1,
        le=4096,
    )
    max_replicas: int = setting(
        4, "maximum number of expert workers of each shard group", common=True, roles=(SCHEDULER,), ge=1, le=4096
    )
    shard_replicas: str = setting(
        "",
        "minimum and maximum for single shard groups, such as 0=3:6,2=1:2; others keep --min-replicas and "
        "--max-replicas",
        roles=(SCHEDULER,),
        pattern=r"^(\d{1,4}=[1-9]\d{0,3}:[1-9]\d{0,3}(,\d{1,4}=[1-9]\d{0,3}:[1-9]\d{0,3})*)?$",
    )
    min_attention: int = setting(
        1,
        "minimum number of attention workers while the model is awake; with layout colocated or lockstep, of replicas "
        "of --workers attention workers",
        roles=(SCHEDULER,),
        ge=1,
        le=4096,
    )
    max_attention: int = setting(
        4,
        "maximum number of attention workers; with layout colocated or lockstep, of replicas of --workers attention "
        "workers",
        common=True,
        roles=(SCHEDULER,),
        ge=1,
        le=4096,
    )
    min_gateways: int = setting(1, "minimum number of gateways", roles=(SCHEDULER,), ge=1, le=4096)
    max_gateways: int = setting(4, "maximum number of gateways", roles=(SCHEDULER,), ge=1, le=4096)
    kubernetes_selector: str | None = setting(
        None,
        "label selector of this deployment's workloads, as for `kubectl get -l`; their replica counts are watched, "
        "and pods that are about to be scaled down are removed from the routing table first (default: the Kubernetes "
        "API is not used; set by the chart)",
        roles=(SCHEDULER,),
        hidden=True,
        min_length=1,
    )
    pod: str | None = setting(
        None,
        "name of this worker's pod, by which the scheduler knows that it is about to be scaled down (set by the chart)",
        roles=(EXPERTS,),
        hidden=True,
        min_length=1,
    )

    def shard_bounds(self) -> dict[int, tuple[int, int]]:
        """Returns shard group -> its minimum and maximum of replicas, where it has its own."""
        parts = (part.partition("=") for part in self.shard_replicas.split(",") if part)
        pairs = ((shard, bounds.partition(":")) for shard, _, bounds in parts)
        return {int(shard): (int(low), int(high)) for shard, (low, _, high) in pairs}
