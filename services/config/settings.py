"""The settings themselves: name, type, bounds, default, one line of help with the unit, and the roles they concern."""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, field_validator
from pydantic_settings import BaseSettings, NoDecode, PydanticBaseSettingsSource, SettingsConfigDict

from services.config import redis_url as redis_urls
from services.prefix import PrefixScope

ENV_PREFIX = "EXPERTMESH_"
Role = Literal["gateway", "scheduler", "attention", "experts", "colocated", "workers"]
GATEWAY: Literal["gateway"] = "gateway"
SCHEDULER: Literal["scheduler"] = "scheduler"
ATTENTION: Literal["attention"] = "attention"
EXPERTS: Literal["experts"] = "experts"
COLOCATED: Literal["colocated"] = "colocated"
"""Attention and experts in one process: the settings of both, see :func:`services.config.options.concerned`."""
WORKERS: Literal["workers"] = "workers"
"""Those of one machine, a process each: the settings of all of them."""
ROLES: tuple[Role, ...] = (GATEWAY, SCHEDULER, ATTENTION, EXPERTS)
_WITH_MODEL: tuple[Role, ...] = (GATEWAY, ATTENTION, EXPERTS)
_COMPUTING: tuple[Role, ...] = (ATTENTION, EXPERTS)


def _setting(default: Any, summary: str, *, roles: tuple[Role, ...] = ROLES, **bounds: Any) -> Any:
    """A field with its help and the roles that read it; ``bounds`` are pydantic's ge, gt, le, lt, pattern ..."""
    return Field(default, description=summary, json_schema_extra={"roles": list(roles)}, **bounds)


def roles_of(name: str) -> tuple[Role, ...]:
    """The roles that the setting ``name`` concerns."""
    extra = Settings.model_fields[name].json_schema_extra
    assert isinstance(extra, dict)
    concerned = extra["roles"]
    assert isinstance(concerned, list)
    return tuple(role for role in ROLES if role in concerned)


def option(name: str) -> str:
    """``max_model_len`` as it is written on the command line: ``--max-model-len``."""
    return "--" + name.replace("_", "-")


def mask_url(url: str) -> str:
    """``url`` with its password, in the authority or in the query, as ``***``."""
    authority = re.sub(r"(?<=://)([^:/@?#]*):.*@", r"\1:***@", url)
    return re.sub(r"([?&](?:sentinel_)?password=)[^&#]*", r"\1***", authority)


class Settings(BaseSettings):
    """Effective configuration of a process. Times in seconds, sizes in the unit of the name or the help.

    Constructed directly it takes its arguments and nothing else; :func:`services.config.load_settings` reads the
    command line, the environment and the file.
    """

    model_config = SettingsConfigDict(
        frozen=True,
        extra="forbid",
        env_prefix=ENV_PREFIX,
        env_ignore_empty=True,
        hide_input_in_errors=True,
        allow_inf_nan=False,
    )

    # What is served
    model: Path | None = _setting(None, "folder of the checkpoint, in the hub's layout", roles=_WITH_MODEL)
    served_model_name: str | None = _setting(
        None, "name of the model in the API (default: the folder's name)", roles=_WITH_MODEL, min_length=1
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = _setting(
        "auto", "type of weights and activations; auto is the checkpoint's own", roles=_COMPUTING
    )
    device: str = _setting(
        "auto", "torch device, such as cpu or cuda:0; auto takes a GPU if there is one", roles=_COMPUTING
    )
    gpu: int = _setting(
        0, "number of the GPU that --device auto takes; `serve` numbers its workers", roles=_COMPUTING, ge=0
    )
    max_model_len: int | None = _setting(
        None, "longest prompt plus answer, tokens (default: the model's own)", roles=(GATEWAY, ATTENTION), ge=1
    )

    # Where
    host: str = _setting("127.0.0.1", "address to listen on: REST on the gateway, metrics elsewhere", min_length=1)
    advertise: str | None = _setting(
        None,
        "address under which other hosts reach this process (default: --host, or this machine's name if that is any)",
        roles=_COMPUTING,
        min_length=1,
    )
    port: int = _setting(8000, "port of the REST API; 0 picks a free one", roles=(GATEWAY,), ge=0, le=65535)
    metrics_port: int = _setting(
        0,
        "port of /metrics, /health and /ready; 0 picks a free one. Gateways: of /metrics alone; 0 is --port",
        roles=(GATEWAY, SCHEDULER, ATTENTION, EXPERTS),
        ge=0,
        le=65535,
    )
    metrics_upstreams: Annotated[list[str], NoDecode] = _setting(
        [],
        "role=url of other roles' /metrics, comma-separated, that the gateway adds to its own (set by `serve`)",
        roles=(GATEWAY,),
    )

    # Queue
    redis_url: str | None = _setting(
        None, "redis://, rediss://, redis+sentinel:// or unix:// URL; `serve` without it runs a private Redis"
    )
    redis_url_file: Path | None = _setting(
        None, "file that holds the Redis URL and nothing else, so that its password stands in no command line"
    )
    namespace: str = _setting(
        "expertmesh",
        "prefix of all keys in Redis; deployments that share a Redis differ in it",
        pattern=r"^[A-Za-z0-9_.:-]{1,64}$",
    )
    max_queued_requests: int = _setting(1024, "requests that may wait; more get 429", roles=(GATEWAY,), ge=1)
    max_queued_tokens: int = _setting(
        4_000_000, "tokens (prompt + max_tokens) that may wait; more get 429", roles=(GATEWAY,), ge=1
    )
    lease: float = _setting(6.0, "seconds without a heartbeat after which a process counts as dead", ge=0.1, le=3600)
    gateway_lease: float | None = _setting(
        None,
        "the same of a gateway, seconds: for so long its requests go on without it (default: five times --lease)",
        roles=(GATEWAY,),
        ge=0.1,
        le=3600,
    )
    max_attempts: int = _setting(
        8, "lost attempts after which a request is dead-lettered; 3 without a new token suffice", ge=1, le=100
    )
    request_timeout: float = _setting(
        600.0, "seconds from admission to the deadline of a request", roles=(GATEWAY,), gt=0, le=86_400
    )
    fair_quantum: int = _setting(1024, "tokens a tenant may start per round of deficit round-robin", ge=1)
    idempotency_ttl: float = _setting(
        3600.0, "seconds for which an Idempotency-Key is remembered", roles=(GATEWAY,), ge=1, le=604_800
    )

    # Attention worker
    max_num_seqs: int = _setting(64, "sequences in one batch", roles=(ATTENTION,), ge=1, le=65_536)
    max_num_batched_tokens: int = _setting(
        512, "tokens in one step of the engine", roles=(ATTENTION,), ge=1, le=1 << 20
    )
    kv_blocks: int | None = _setting(None, "KV blocks (default: from --kv-memory-gib)", roles=(ATTENTION,), ge=1)
    kv_memory_gib: float = _setting(1.0, "memory for KV blocks, GiB", roles=(ATTENTION,), gt=0, le=1 << 20)
    block_size: int = _setting(16, "tokens in a KV block", roles=(ATTENTION,), ge=1, le=1024)
    prefix_cache: bool = _setting(True, "keep the KV blocks of finished prompts for later ones", roles=(ATTENTION,))
    prefix_cache_scope: PrefixScope = _setting(
        "tenant",
        "among whom they are shared: the requests of a tenant (an API key), or all",
        roles=(SCHEDULER, ATTENTION),
    )
    chunked_prefill: bool = _setting(True, "split long prompts over several steps", roles=(ATTENTION,))
    kv_overcommit: float = _setting(
        1.5, "tokens assigned to a worker, as a multiple of its KV tokens", roles=(ATTENTION,), gt=0, le=100
    )
    cuda_graphs: Literal["auto", "off"] = _setting(
        "auto",
        "steps by CUDA graph: auto on a GPU, where experts are in the process or in shared memory",
        roles=(ATTENTION,),
    )
    threads: int | None = _setting(
        None, "CPU threads that compute (default: torch's own choice)", roles=_COMPUTING, ge=1
    )
    publish_buffer_tokens: int = _setting(
        65_536, "computed tokens held while Redis is away; then the engine pauses", roles=(ATTENTION,), ge=1
    )
    step_timeout: float = _setting(
        300.0, "seconds after which a step of the engine counts as hung: the worker exits", roles=(ATTENTION,), gt=0
    )

    attention_workers: int = _setting(1, "attention workers that `serve` or `workers` starts", roles=(), ge=0, le=256)

    # Experts in processes of their own
    experts: Literal["local", "tcp", "mesh"] = _setting(
        "local",
        "where the experts are: in the attention worker's process, in expert workers, or shared by attention workers",
        roles=(ATTENTION,),
    )
    expert_workers: int = _setting(
        0,
        "expert workers that `serve` or `workers` starts; 0 leaves the experts with the attention worker",
        roles=(SCHEDULER,),
        ge=0,
        le=256,
    )
    expert_groups: int | None = _setting(
        None,
        "shard groups that the experts are split into (default: as many as `serve` starts expert workers, else 1)",
        roles=(SCHEDULER,),
        ge=1,
        le=4096,
    )
    rebalance_after: float = _setting(
        60.0,
        "seconds for which a routing table stands before experts move for the load alone",
        roles=(SCHEDULER,),
        gt=0,
        le=86_400,
    )
    expert_group: int | None = _setting(
        None, "shard group that this worker holds (default: the scheduler decides)", roles=(EXPERTS,), ge=0
    )
    fabric_port: int = _setting(
        0, "port on which attention workers reach an expert worker; 0 picks one", roles=(EXPERTS,), ge=0, le=65535
    )
    fabric_secret_file: Path | None = _setting(
        None, "file with the secret that attention and expert workers share (see `serve`)", roles=_COMPUTING
    )
    fabric_tls_cert: Path | None = _setting(
        None, "this expert worker's certificate, PEM; connections are then encrypted", roles=(EXPERTS,)
    )
    fabric_tls_key: Path | None = _setting(None, "the key of --fabric-tls-cert, PEM", roles=(EXPERTS,))
    fabric_tls_ca: Path | None = _setting(
        None, "certificates, PEM, of which one has signed each expert worker's --fabric-tls-cert", roles=(ATTENTION,)
    )
    fabric_tls_name: str | None = _setting(
        None,
        "name that expert workers' certificates carry, checked instead of their address",
        roles=(ATTENTION,),
        min_length=1,
    )
    fabric_lane: Literal["auto", "tcp", "nccl", "gloo"] = _setting(
        "auto",
        "how rows travel: tcp in the connection, nccl between GPUs; auto: nccl where it can",
        roles=_COMPUTING,
    )
    fabric_shared: Literal["off", "auto", "host"] = _setting(
        "off",
        "rows of small steps by memory that both workers map: auto between GPUs of one machine, host between CPUs",
        roles=_COMPUTING,
    )
    fabric_teams: Literal["off", "auto"] = _setting(
        "off",
        "steps of several attention workers that use --fabric-shared run as one where that is measured to be faster: "
        "experts' weights are read once for all; low bits of sums may differ by who runs with whom",
        roles=(EXPERTS,),
    )
    node: str | None = _setting(
        None,
        "name of the machine that this worker is on (default: the host's); workers that name the same one are near",
        roles=_COMPUTING,
    )
    fabric_sums: bool = _setting(
        False,
        "expert workers add their outputs up: a row comes back for each row and group, not for each expert; low bits "
        "of sums differ",
        roles=(ATTENTION,),
    )
    expert_capacity: int | None = _setting(
        None, "experts of a layer that this worker has memory for (default: all)", roles=(EXPERTS,), ge=1
    )
    fabric_inbox_rows: int = _setting(
        65_536, "rows that may wait at an expert worker; then it stops reading", roles=(EXPERTS,), ge=1
    )
    exchange_timeout: float = _setting(
        2.0, "seconds for which an exchange waits for an expert worker, then asks a replica", roles=(ATTENTION,), gt=0
    )
    overlap: Literal["auto", "on", "off"] = _setting(
        "auto",
        "compute attention of half a step while the other half's rows are with expert workers; auto measures "
        "whether that is faster",
        roles=(ATTENTION,),
    )
    lookahead: Literal["auto", "on", "off"] = _setting(
        "auto",
        "launch a decode step before the one before it is read; auto: after one that was a CUDA graph",
        roles=(ATTENTION,),
    )
    experts_patience: float = _setting(
        30.0, "seconds for which a step waits for a shard group without workers", roles=(ATTENTION,), ge=0, le=3600
    )

    # Co-located: attention workers that share the experts
    colocated_workers: int = _setting(
        0,
        "attention workers that `serve` or `workers` starts and that share the experts; 0 is one with all",
        roles=(SCHEDULER,),
        ge=0,
        le=256,
    )
    colocated_by: Literal["mesh", "seats"] = _setting(
        "mesh",
        "how those of `serve` share: mesh is in lock-step, all or none; with seats they come, go and die alone, and "
        "between GPUs of one machine are faster (--fabric-shared auto); --autoscale then counts machines of --ranks",
        roles=(SCHEDULER,),
    )
    ranks: int = _setting(
        1,
        "attention workers that share the experts (--experts mesh); --autoscale counts such groups",
        roles=(ATTENTION, SCHEDULER),
        ge=1,
        le=4096,
    )
    rank: int = _setting(0, "number of this one among them, from 0", roles=(ATTENTION,), ge=0)
    mesh_address: str | None = _setting(None, "HOST:PORT on which rank 0 meets the others", roles=(ATTENTION,))
    mesh_timeout: float = _setting(
        30.0, "seconds for which a rank waits for the others; then all ranks start again", roles=(ATTENTION,), gt=0
    )
    mesh_exchange: Literal["auto", "flat", "hierarchical"] = _setting(
        "auto",
        "straight from rank to rank, or between nodes through relays; auto is the latter on several nodes",
        roles=(ATTENTION,),
    )
    relay_pairs: int = _setting(
        0, "relays between two nodes; 0 is as many as they have ranks, 1 the fewest messages", roles=(ATTENTION,), ge=0
    )
    expert_slots: int | None = _setting(
        None, "experts of a layer that a rank holds; more than its share makes replicas", roles=(ATTENTION,), ge=1
    )
    expert_slices: int = _setting(
        1, "ranks over which each expert is split along its inner width", roles=(ATTENTION,), ge=1, le=256
    )

    layer_series: bool = _setting(
        False, "metrics of each layer; without, of all together, as layer=all", roles=_COMPUTING
    )

    # Gateway
    auth: Literal["auto", "required", "off"] = _setting(
        "auto", "API keys: auto requires them unless --host is loopback", roles=(GATEWAY,)
    )
    api_keys_file: Path | None = _setting(None, "file of hashed API keys (see `expertmesh keys`)", roles=(GATEWAY,))
    answer_memory: int = _setting(
        256,
        "MiB for answers: under way, not read yet by their clients, and (a quarter of it) kept for their "
        "Idempotency-Keys; over it who holds most gets 429, and its largest answers end",
        roles=(GATEWAY,),
        ge=1,
        le=1 << 20,
    )
    max_body_bytes: int = _setting(4 * 1024 * 1024, "largest request body, bytes", roles=(GATEWAY,), ge=1024)
    max_connections: int = _setting(
        10_000,
        "open connections; over it those that are not served make room, then probes alone are answered",
        roles=(GATEWAY,),
        ge=16,
        le=1 << 20,
    )
    drain_delay: float = _setting(
        0.0,
        "seconds after SIGTERM for which requests are still taken, up to thrice as long while they keep coming",
        roles=(GATEWAY,),
        ge=0,
        le=600,
    )
    drain_timeout: float = _setting(30.0, "seconds that open requests get to end at shutdown", ge=0, le=3600)

    # Autoscaling
    autoscale: Literal["off", "on"] = _setting(
        "off",
        "whether the leading scheduler says how many replicas it wants (expertmesh_wanted_replicas)",
        roles=(SCHEDULER,),
    )
    sleep_after: float = _setting(
        0.0,
        "seconds without requests after which no attention or expert workers are wanted; 0: never",
        roles=(SCHEDULER,),
        ge=0,
        le=31_536_000,
    )
    scale_down_after: float = _setting(
        120.0,
        "seconds for which fewer replicas must have sufficed before fewer are wanted",
        roles=(SCHEDULER,),
        ge=0,
        le=86_400,
    )
    target_ttft: float = _setting(
        2.0, "seconds to the first token that requests should stay below", roles=(GATEWAY,), gt=0, le=3600
    )
    target_tpot: float = _setting(
        0.1,
        "seconds between a request's tokens, on average, that it should stay below",
        roles=(GATEWAY,),
        gt=0,
        le=3600,
    )
    fewest_replicas: int = _setting(
        1, "expert workers wanted of each shard group at least, while awake", roles=(SCHEDULER,), ge=1, le=4096
    )
    most_replicas: int = _setting(
        4, "expert workers wanted of each shard group at most", roles=(SCHEDULER,), ge=1, le=4096
    )
    shard_replicas: str = _setting(
        "",
        "fewest and most of single shard groups instead, such as 0=3:6,2=1:2",
        roles=(SCHEDULER,),
        pattern=r"^(\d{1,4}=[1-9]\d{0,3}:[1-9]\d{0,3}(,\d{1,4}=[1-9]\d{0,3}:[1-9]\d{0,3})*)?$",
    )
    fewest_attention: int = _setting(
        1, "attention workers, or groups of --ranks, wanted at least, while awake", roles=(SCHEDULER,), ge=1, le=4096
    )
    most_attention: int = _setting(
        4, "attention workers, or groups of them, wanted at most", roles=(SCHEDULER,), ge=1, le=4096
    )
    fewest_gateways: int = _setting(1, "gateways wanted at least", roles=(SCHEDULER,), ge=1, le=4096)
    most_gateways: int = _setting(4, "gateways wanted at most", roles=(SCHEDULER,), ge=1, le=4096)

    # Kubernetes
    kubernetes: Literal["off", "on"] = _setting(
        "off",
        "watch replica counts in this pod's namespace: who is about to leave is out of the routing table before",
        roles=(SCHEDULER,),
    )
    kubernetes_selector: str | None = _setting(
        None,
        "labels of this deployment's workloads, as `kubectl get -l` takes them",
        roles=(SCHEDULER,),
        min_length=1,
    )
    pod: str | None = _setting(
        None, "name of this worker's pod, by which the scheduler knows who leaves", roles=(EXPERTS,), min_length=1
    )

    # Process
    log_level: Literal["debug", "info", "warning", "error"] = _setting("info", "least severe message that is logged")
    log_format: Literal["auto", "text", "json"] = _setting(
        "auto", "auto is text on a terminal and JSON lines elsewhere"
    )
    supervisor_pid: int | None = _setting(
        None, "process whose death ends this one (set by `serve` and `workers`)", ge=1
    )
    process: str | None = _setting(
        None, "name of this process in its logs (set by `serve` and `workers`)", min_length=1
    )

    @property
    def own_gateway_lease(self) -> float:
        """Of a gateway, in seconds. Longer than others' leases: nobody can take over what only its clients wait for."""
        return 5 * self.lease if self.gateway_lease is None else self.gateway_lease

    def shard_bounds(self) -> dict[int, tuple[int, int]]:
        """Shard group -> its fewest and most replicas, where it has its own."""
        parts = (part.partition("=") for part in self.shard_replicas.split(",") if part)
        pairs = ((shard, bounds.partition(":")) for shard, _, bounds in parts)
        return {int(shard): (int(fewest), int(most)) for shard, (fewest, _, most) in pairs}

    @classmethod
    def settings_customise_sources(cls, *_: Any, **sources: Any) -> tuple[PydanticBaseSettingsSource, ...]:
        """Arguments only: the other sources are read by ``load_layered``, which knows each value's origin."""
        return (sources["init_settings"],)

    @field_validator("*", mode="before")
    @classmethod
    def _no_numbers_from_booleans(cls, value: object, info: Any) -> object:
        """YAML's ``port: yes`` is a mistake, not port 1."""
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise ValueError("is a boolean")
        return value

    @field_validator("metrics_upstreams", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value

    @field_validator("metrics_upstreams")
    @classmethod
    def _pairs(cls, value: list[str]) -> list[str]:
        if any(not re.match(r"^[a-z0-9_-]+=https?://", part) for part in value):
            raise ValueError("is not role=url")
        return value

    @field_validator(
        *("model", "api_keys_file", "fabric_secret_file", "fabric_tls_cert", "fabric_tls_key", "fabric_tls_ca"),
        "redis_url_file",
    )
    @classmethod
    def _home(cls, value: Path | None) -> Path | None:
        return value.expanduser() if value else value

    @field_validator("redis_url")
    @classmethod
    def _redis_scheme(cls, value: str | None) -> str | None:
        return value if value is None else redis_urls.checked(value)

    @property
    def model_name(self) -> str:
        """Name of the model in the API."""
        assert self.model is not None, "the role needs no model"
        return self.served_model_name or self.model.resolve().name

    def shown(self) -> dict[str, object]:
        """All values as JSON knows them, secrets masked."""
        values: dict[str, object] = self.model_dump(mode="json")
        return values | {"redis_url": mask_url(self.redis_url) if self.redis_url else None}

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        return self.shown().items()
