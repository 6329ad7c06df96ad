"""Section: where the experts are, and how rows reach them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import BaseModel

from services.config.fields import ATTENTION, COMPUTING, EXPERTS, SCHEDULER, setting

Layout = Literal["local", "disaggregated", "colocated", "lockstep"]


class ExpertSettings(BaseModel):
    """The layout, its counts, and the connections between attention and experts."""

    layout: Layout = setting(
        "local",
        "where the experts are. local: all of them in each attention worker; disaggregated: in separate expert "
        "workers; colocated: in the attention workers, each of which holds a share and computes it for all; lockstep: "
        "spread over attention workers that run every step together",
        common=True,
        roles=(SCHEDULER, ATTENTION),
    )
    workers: int = setting(
        1,
        "number of attention workers that `serve` or `workers` starts; with layout lockstep, the number of ranks. "
        "With --autoscale on and layout lockstep or colocated, that many workers form one replica",
        common=True,
        roles=(SCHEDULER, ATTENTION),
        ge=0,
        le=4096,
    )
    expert_workers: int | None = setting(
        None,
        "number of expert workers that `serve` or `workers` starts with layout disaggregated (default: 1)",
        common=True,
        roles=(SCHEDULER,),
        ge=0,
        le=256,
    )
    expert_groups: int | None = setting(
        None,
        "number of shard groups that the experts are split into; workers that hold the same group are replicas "
        "(default: the number of workers with experts that `serve` starts, otherwise 1)",
        common=True,
        roles=(SCHEDULER,),
        ge=1,
        le=4096,
    )
    expert_group: int | None = setting(
        None, "shard group that this worker holds (default: the scheduler assigns one)", roles=(EXPERTS,), ge=0
    )
    expert_capacity: int | None = setting(
        None, "number of experts per layer that this worker has memory for (default: all)", roles=(EXPERTS,), ge=1
    )
    rebalance_after: float = setting(
        60.0,
        "seconds since the last change of the routing table before experts are moved only to balance the load",
        roles=(SCHEDULER,),
        gt=0,
        le=86_400,
    )
    experts_timeout: float = setting(
        30.0,
        "seconds that a step waits for a shard group that has no workers, or a lockstep rank for the others; a step "
        "counts as stuck after ten times as long, but at least a minute",
        roles=(ATTENTION,),
        ge=0,
        le=3600,
    )
    exchange_timeout: float = setting(
        2.0, "seconds to wait for an expert worker before asking a replica", roles=(ATTENTION,), gt=0
    )
    fabric_port: int = setting(
        0,
        "port on which an expert worker accepts attention workers; 0 picks a free one",
        roles=(EXPERTS,),
        ge=0,
        le=65535,
    )
    fabric_secret_file: Path | None = setting(
        None,
        "file with the secret that attention and expert workers share (default: `serve` makes one for its workers)",
        roles=COMPUTING,
    )
    fabric_tls_cert: Path | None = setting(
        None,
        "PEM file with the certificate of this expert worker; its connections are then encrypted",
        roles=(EXPERTS,),
    )
    fabric_tls_key: Path | None = setting(None, "PEM file with the private key of --fabric-tls-cert", roles=(EXPERTS,))
    fabric_tls_ca: Path | None = setting(
        None,
        "PEM file with the CA certificates that the certificates of expert workers are verified against",
        roles=(ATTENTION,),
    )
    fabric_tls_name: str | None = setting(
        None,
        "name to expect in the certificates of expert workers instead of their address",
        roles=(ATTENTION,),
        min_length=1,
    )
    fabric_lane: Literal["auto", "tcp", "nccl"] = setting(
        "auto",
        "how tokens travel between attention and expert workers: tcp, nccl (from GPU to GPU), or auto, which uses "
        "NCCL where it can",
        roles=COMPUTING,
    )
    fabric_shared: Literal["auto", "host", "off"] = setting(
        "auto",
        "send the tokens of small steps through shared memory: auto does so between GPUs of one machine, host between "
        "processes on its CPUs",
        roles=COMPUTING,
    )
    joint_steps: Literal["off", "auto"] = setting(
        "off",
        "experimental: with --fabric-shared, compute steps of several attention workers as one where that measures "
        "faster, so that the weights of experts are read once for all of them; the low bits of results may then "
        "depend on which workers ran together",
        roles=(EXPERTS,),
        hidden=True,
    )

    @property
    def uses_seats(self) -> bool:
        """Whether attention reaches experts by a link to seats, some of which may be in other processes."""
        return self.layout in ("disaggregated", "colocated")

    @property
    def disaggregated_experts(self) -> int:
        """How many expert workers there are to start."""
        if self.layout != "disaggregated":
            return 0
        return 1 if self.expert_workers is None else self.expert_workers

    @property
    def seats(self) -> int:
        """How many seats for experts there are to start, of expert workers or of colocated attention workers."""
        return self.workers if self.layout == "colocated" else self.disaggregated_experts

    @property
    def step_timeout(self) -> float:
        """Seconds after which a step of the engine counts as stuck: the worker exits."""
        return max(60.0, 10 * self.experts_timeout)

    @property
    def lockstep_timeout(self) -> float:
        """Seconds for which a rank waits for the others; then all ranks start again."""
        return max(1.0, self.experts_timeout)
