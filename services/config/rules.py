"""Rules for settings together: a function for each rule, which raises ConfigError and says what to write instead.

Rules see the settings of one process and its role; the role of `serve`, which starts all others, is None.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from services.config.fields import ATTENTION, COLOCATED, COMPUTING, EXPERTS, GATEWAY, SCHEDULER, WORKERS, Role, option
from services.config.settings import Settings
from services.errors import ConfigError

Rule = Callable[[Settings, Role | None], None]
TITLES: dict[Role | None, str] = {
    None: "server",
    GATEWAY: "gateway",
    SCHEDULER: "scheduler",
    ATTENTION: "attention worker",
    EXPERTS: "expert worker",
    COLOCATED: "attention worker with experts",
    WORKERS: "workers of one machine",
}


def require(settings: Settings, role: Role | None) -> None:
    """Refuses settings with which ``role`` cannot run on its own.

    Raises:
        ConfigError: a rule is broken; the error says which settings break it, and what to write.
    """
    for rule in RULES:
        rule(settings, role)
    for part, own in _parts(settings, role):
        require(own, part)


def _parts(settings: Settings, role: Role | None) -> list[tuple[Role, Settings]]:
    """Returns the roles that ``role`` consists of, each with its settings, where it consists of several."""
    if role == COLOCATED:
        both = colocated(settings)
        return [(ATTENTION, both), (EXPERTS, both)]
    if role != WORKERS:
        return []
    if settings.layout == "colocated":
        return [(COLOCATED, settings)]
    counts: dict[Role, int] = {ATTENTION: settings.workers, EXPERTS: settings.disaggregated_experts}
    return [(part, settings) for part, count in counts.items() if count]


def colocated(settings: Settings) -> Settings:
    """Returns the settings of an attention worker and an expert worker in one process: without a lane to itself, and
    without overlap, since this GPU computes experts, too.

    Raises:
        ConfigError: something else was asked for.
    """
    others = {
        "overlap": ("auto", "off"),
        "fabric_lane": ("auto", "tcp"),
        "expert_slots": (None,),
        "expert_slices": (1,),
    }
    for name, allowed in others.items():
        if (value := getattr(settings, name)) not in allowed:
            raise ConfigError(
                f"{option(name)} {value} cannot be combined with --layout colocated.",
                hint="Leave it out, or choose --layout disaggregated or --layout lockstep.",
            )
    return settings.model_copy(update={"layout": "colocated", "fabric_lane": "tcp", "overlap": "off"})


def check_bounds(given: object, names: Iterable[str]) -> None:
    """Raises ConfigError where ``min_NAME`` of ``given`` is more than its ``max_NAME``."""
    for name in names:
        low, high = getattr(given, f"min_{name}"), getattr(given, f"max_{name}")
        if low > high:
            raise ConfigError(
                f"--min-{name} {low} is more than --max-{name} {high}.", hint="Lower one or raise the other."
            )


def _expert_workers_have_a_layout(settings: Settings, role: Role | None) -> None:
    starts_them = role in (None, WORKERS, SCHEDULER)
    if starts_them and settings.expert_workers is not None and settings.layout != "disaggregated":
        raise ConfigError(
            f"--expert-workers {settings.expert_workers} does not apply to --layout {settings.layout}, which has none.",
            hint="Add --layout disaggregated, or leave --expert-workers out.",
        )


def _groups_have_workers(settings: Settings, role: Role | None) -> None:
    groups, layout = settings.expert_groups, settings.layout
    if role not in (None, WORKERS) or groups is None:
        return
    if layout in ("local", "lockstep"):
        raise ConfigError(
            f"--expert-groups {groups} does not apply to --layout {layout}, which has no shard groups.",
            hint="Use --layout disaggregated or --layout colocated, or leave --expert-groups out.",
        )
    if role is None and layout == "colocated" and groups > settings.workers:
        raise ConfigError(
            f"--expert-groups {groups} exceeds the {settings.workers} seats that --workers gives.",
            hint="Raise --workers or lower --expert-groups.",
        )


def _serve_has_every_worker(settings: Settings, role: Role | None) -> None:
    if role is None and not settings.workers:
        raise ConfigError("At least one attention worker is needed.", hint="Give --workers N.")
    elsewhere = settings.redis_url is not None and settings.fabric_secret_file is not None
    if role is None and settings.expert_workers == 0 and not elsewhere:
        raise ConfigError(
            "At least one expert worker is needed.",
            hint="Give --expert-workers N, or --redis-url and --fabric-secret-file of expert workers elsewhere.",
        )


def _serve_can_colocate(settings: Settings, role: Role | None) -> None:
    if role is None and settings.layout == "colocated":
        colocated(settings)


def _machine_has_a_worker(settings: Settings, role: Role | None) -> None:
    if role == WORKERS and not (settings.workers or settings.disaggregated_experts):
        raise ConfigError(
            "There is no worker to start.",
            hint="Give --workers N, or --layout disaggregated with --expert-workers N.",
        )


def _machine_has_ports(settings: Settings, role: Role | None) -> None:
    """The common metrics page uses --metrics-port, each worker one of the next ports; each seat one from --fabric-port
    on."""
    if role != WORKERS:
        return
    workers = settings.workers + settings.disaggregated_experts
    taken = {
        "--metrics-port": range(settings.metrics_port, settings.metrics_port and settings.metrics_port + workers + 1),
        "--fabric-port": range(settings.fabric_port, settings.fabric_port and settings.fabric_port + settings.seats),
    }
    for name, ports in taken.items():
        if ports and ports[-1] > 65_535:
            raise ConfigError(
                f"{name} {ports[0]} leaves no room for the ports of all workers.",
                hint=f"{len(ports)} consecutive ports are needed.",
            )
    pages, fabric = taken.values()
    if pages and fabric and pages[0] <= fabric[-1] and fabric[0] <= pages[-1]:
        raise ConfigError(
            f"Metrics ports {pages[0]} to {pages[-1]} and seat ports {fabric[0]} to {fabric[-1]} overlap.",
            hint="Move --metrics-port or --fabric-port.",
        )


def _machine_shares_no_device(settings: Settings, role: Role | None) -> None:
    if role == WORKERS and ":" in settings.device:
        raise ConfigError(
            f"--device {settings.device} would put all workers on one device.",
            hint="Choose cuda or auto, which give each worker a GPU of its own, or cpu.",
        )


def _machine_starts_no_ranks(settings: Settings, role: Role | None) -> None:
    if role == WORKERS and settings.layout == "lockstep":
        raise ConfigError(
            "Lock-step workers on several machines have to be started one by one.",
            hint="Give --layout colocated, or run `expertmesh attention --layout lockstep --rank R` for each.",
        )


def _key_is_asked_for(settings: Settings, role: Role | None) -> None:
    if role in (None, GATEWAY) and settings.api_key is not None and settings.auth == "off":
        raise ConfigError("--api-key has no effect with --auth off.", hint="Leave one of them out.")


def _model_is_given(settings: Settings, role: Role | None) -> None:
    if role in (GATEWAY, ATTENTION, EXPERTS) and settings.model is None:
        raise ConfigError(
            f"The {TITLES[role]} needs a checkpoint.",
            hint="Give its folder with --model DIR, or ORG/NAME of the Hugging Face Hub.",
        )


def _redis_is_given(settings: Settings, role: Role | None) -> None:
    if role in (GATEWAY, SCHEDULER, ATTENTION, EXPERTS) and settings.redis_url is None:
        raise ConfigError(
            f"The {TITLES[role]} needs a Redis.",
            hint="Give --redis-url redis://HOST:PORT, or run all roles with `expertmesh serve`, which brings its own.",
        )


def _replicas_have_room(settings: Settings, role: Role | None) -> None:
    if role != SCHEDULER:
        return
    check_bounds(settings, ("replicas", "attention", "gateways"))
    for shard, (low, high) in settings.shard_bounds().items():
        if low > high:
            raise ConfigError(
                f"--shard-replicas {shard}={low}:{high}: the minimum is more than the maximum.",
                hint="Lower one or raise the other.",
            )


def _overlap_has_an_exchange(settings: Settings, role: Role | None) -> None:
    if role == ATTENTION and settings.overlap == "on" and settings.layout in ("local", "lockstep"):
        raise ConfigError(
            f"--overlap on has no effect with --layout {settings.layout}.",
            hint="Two-batch overlap needs separate expert workers (--layout disaggregated); leave it out.",
        )


def _ranks_can_meet(settings: Settings, role: Role | None) -> None:
    if role != ATTENTION or settings.layout != "lockstep":
        return
    address, _, port = (settings.lockstep_address or "").rpartition(":")
    if not address or not port.isdigit():
        raise ConfigError("All ranks need rank 0's address.", hint="Give each of them --lockstep-address HOST:PORT.")
    if settings.rank >= settings.workers:
        raise ConfigError(
            f"--rank {settings.rank} is out of range for --workers {settings.workers}.", hint="Ranks count from 0."
        )


def _slices_divide_the_ranks(settings: Settings, role: Role | None) -> None:
    ranks = role == ATTENTION and settings.layout == "lockstep"
    if ranks and settings.workers % settings.expert_slices:
        raise ConfigError(
            f"--workers {settings.workers} is not a multiple of --expert-slices {settings.expert_slices}.",
            hint="Each expert is split over that many ranks: change one of the two.",
        )


def _rows_have_a_secret(settings: Settings, role: Role | None) -> None:
    connects = _connects(settings, role)
    lockstep = role == ATTENTION and settings.layout == "lockstep"
    if (connects or lockstep) and settings.fabric_secret_file is None:
        others = "attention and expert workers" if connects else "all ranks"
        raise ConfigError(
            f"The {TITLES[role]} needs the secret that {others} share.",
            hint="Put the same 16 or more random bytes into a file on each host: --fabric-secret-file FILE.",
        )


def _names_are_proven(settings: Settings, role: Role | None) -> None:
    if role == ATTENTION and settings.fabric_tls_name is not None and settings.fabric_tls_ca is None:
        raise ConfigError(
            "--fabric-tls-name has no effect, because connections are not encrypted.",
            hint="Add --fabric-tls-ca.",
        )


def _encrypted_rows_have_no_lane(settings: Settings, role: Role | None) -> None:
    encrypted = settings.fabric_tls_ca if role == ATTENTION else settings.fabric_tls_cert
    if _connects(settings, role) and encrypted and settings.fabric_lane == "nccl":
        raise ConfigError(
            "Rows that go over --fabric-lane nccl cannot be encrypted.", hint="Choose auto or tcp, or leave TLS out."
        )


def _traces_have_a_place(settings: Settings, role: Role | None) -> None:
    if role is not None and settings.traces_wanted and not settings.traces_have_a_place:
        raise ConfigError(
            f"The {TITLES[role]} is to trace requests, but their traces have no place to go.",
            hint="Give --otlp-endpoint URL or --trace-folder DIR.",
        )


def _ranks_share_sums(settings: Settings, role: Role | None) -> None:
    if settings.batch_invariant and settings.layout == "lockstep" and role in (None, ATTENTION):
        raise ConfigError(
            "--batch-invariant cannot be combined with --layout lockstep: each rank adds up what it holds of a token.",
            hint="Choose --layout local, disaggregated or colocated, or leave --batch-invariant out.",
        )


def _invariant_products_are_dense(settings: Settings, role: Role | None) -> None:
    if settings.batch_invariant and settings.held_experts != "dense" and role in (None, *COMPUTING):
        raise ConfigError(
            f"--batch-invariant cannot be combined with --expert-format {settings.expert_format}: products that treat "
            "each row by itself take no integers.",
            hint="Choose --expert-format dense, or leave --batch-invariant out.",
        )


def _invariant_linears_are_dense(settings: Settings, role: Role | None) -> None:
    if settings.batch_invariant and settings.dense_format == "stored" and role in (None, *COMPUTING):
        raise ConfigError(
            "--batch-invariant cannot be combined with --dense-format stored: products that treat each row by itself "
            "take no integers.",
            hint="Choose --dense-format dense, or leave --batch-invariant out.",
        )


def _invariant_drafts_are_chains(settings: Settings, role: Role | None) -> None:
    branches = settings.speculation is not None and settings.speculation.num_branches > 1
    if settings.batch_invariant and branches and role in (None, ATTENTION):
        raise ConfigError(
            "--batch-invariant cannot be combined with num_branches in --speculative-config: keys of a branch lie in "
            "other places, and sums have another order.",
            hint="Leave num_branches or --batch-invariant out.",
        )


def _ranks_do_not_sleep(settings: Settings, role: Role | None) -> None:
    if settings.enable_sleep_mode and settings.layout == "lockstep" and role in (None, ATTENTION):
        raise ConfigError(
            "--enable-sleep-mode cannot be combined with --layout lockstep.",
            hint="Choose --layout local, disaggregated or colocated, or leave --enable-sleep-mode out.",
        )


def _connects(settings: Settings, role: Role | None) -> bool:
    """Returns whether rows go between this process and attention or expert workers."""
    return role == EXPERTS or (role == ATTENTION and settings.uses_seats)


RULES: tuple[Rule, ...] = (
    _expert_workers_have_a_layout,
    _groups_have_workers,
    _serve_has_every_worker,
    _serve_can_colocate,
    _machine_has_a_worker,
    _machine_has_ports,
    _machine_shares_no_device,
    _machine_starts_no_ranks,
    _key_is_asked_for,
    _model_is_given,
    _redis_is_given,
    _replicas_have_room,
    _overlap_has_an_exchange,
    _ranks_can_meet,
    _slices_divide_the_ranks,
    _ranks_share_sums,
    _invariant_products_are_dense,
    _invariant_linears_are_dense,
    _invariant_drafts_are_chains,
    _ranks_do_not_sleep,
    _rows_have_a_secret,
    _names_are_proven,
    _encrypted_rows_have_no_lane,
    _traces_have_a_place,
)
