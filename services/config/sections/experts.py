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
        "where the experts are: all in each attention worker; disaggregated, in expert workers; colocated, in a seat "
        "that each attention worker has of its own; lockstep, spread over attention workers that compute together",
        roles=(SCHEDULER, ATTENTION),
    )
    workers: int = setting(
        1,
        "attention workers that `serve` or `workers` starts; with lockstep the ranks that compute together, and with "
        "--autoscale those that are one replica of layouts lockstep and colocated",
        roles=(SCHEDULER, ATTENTION),
        ge=0,
        le=4096,
    )
    expert_workers: int | None = setting(
        None,
        "expert workers that `serve` or `workers` starts with layout disaggregated (default: 1)",
        roles=(SCHEDULER,),
        ge=0,
        le=256,
    )
    expert_groups: int | None = setting(
        None,
        "shard groups that the experts are split into (default: as many as `serve` starts workers that hold some, "
        "else 1)",
        roles=(SCHEDULER,),
        ge=1,
        le=4096,
    )
    expert_group: int | None = setting(
        None, "shard group that this worker holds (default: the scheduler decides)", roles=(EXPERTS,), ge=0
    )
    expert_capacity: int | None = setting(
        None, "experts of a layer that this worker has memory for (default: all)", roles=(EXPERTS,), ge=1
    )
    rebalance_after: float = setting(
        60.0,
        "seconds for which a routing table stands before experts move for the load alone",
        roles=(SCHEDULER,),
        gt=0,
        le=86_400,
    )
    experts_timeout: float = setting(
        30.0,
        "seconds for which a step waits for a shard group without workers, or a rank for the others; after ten times "
        "as long, and a minute at least, a step counts as stuck",
        roles=(ATTENTION,),
        ge=0,
        le=3600,
    )
    exchange_timeout: float = setting(
        2.0, "seconds for which an exchange waits for an expert worker, then asks a replica", roles=(ATTENTION,), gt=0
    )
    fabric_port: int = setting(
        0, "port on which attention workers reach an expert worker; 0 picks one", roles=(EXPERTS,), ge=0, le=65535
    )
    fabric_secret_file: Path | None = setting(
        None, "file with the secret that attention and expert workers share (see `serve`)", roles=COMPUTING
    )
    fabric_tls_cert: Path | None = setting(
        None, "this expert worker's certificate, PEM; connections are then encrypted", roles=(EXPERTS,)
    )
    fabric_tls_key: Path | None = setting(None, "the key of --fabric-tls-cert, PEM", roles=(EXPERTS,))
    fabric_tls_ca: Path | None = setting(
        None, "certificates, PEM, of which one has signed each expert worker's --fabric-tls-cert", roles=(ATTENTION,)
    )
    fabric_tls_name: str | None = setting(
        None,
        "name that expert workers' certificates carry, checked instead of their address",
        roles=(ATTENTION,),
        min_length=1,
    )
    fabric_lane: Literal["auto", "tcp", "nccl"] = setting(
        "auto",
        "how rows travel: tcp in the connection, nccl between GPUs; auto: nccl where it can",
        roles=COMPUTING,
    )
    fabric_shared: Literal["auto", "host", "off"] = setting(
        "auto",
        "rows of small steps by memory that both workers map: auto between GPUs of one machine, host between CPUs",
        roles=COMPUTING,
    )
    joint_steps: Literal["off", "auto"] = setting(
        "off",
        "an experiment: steps of several attention workers that use --fabric-shared run as one where that is measured "
        "to be faster; experts' weights are read once for all, and low bits of sums may differ by who runs with whom",
        roles=(EXPERTS,),
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
