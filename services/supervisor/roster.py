"""Which workers the settings ask for, and the device, ports and group of each on one machine. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from services.config import ATTENTION, COLOCATED, EXPERTS, Role, Settings

COMPUTING: tuple[Role, ...] = (ATTENTION, COLOCATED, EXPERTS)


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """One worker of a machine. ``fabric_port`` None: no seat; 0: any. ``expert_group`` None: the scheduler chooses.
    ``share``: settings by which the workers on one GPU divide it."""

    name: str
    role: Role
    device: str
    metrics_port: int
    fabric_port: int | None = None
    expert_group: int | None = None
    share: Mapping[str, object] = field(default_factory=dict)

    def changes(self) -> dict[str, object]:
        """Return the settings of this worker that differ from those of all."""
        own: dict[str, object] = {"device": self.device, "metrics_port": self.metrics_port, **self.share}
        if self.fabric_port is not None:
            own |= {"fabric_port": self.fabric_port, "expert_group": self.expert_group}
        return own

    def __str__(self) -> str:
        text = f"{self.name}: device {self.device}, metrics on port {self.metrics_port}"
        if self.fabric_port is None:
            return text
        group = "a group chosen by the scheduler" if self.expert_group is None else f"group {self.expert_group}"
        return f"{text}, seat for {group} on {f'port {self.fabric_port}' if self.fabric_port else 'any port'}"


def computing(settings: Settings) -> dict[Role, list[str]]:
    """Return the names of the workers of each role. A single attention worker that is no rank has no number."""
    workers, layout = settings.workers, settings.layout
    alone = workers == 1 and layout != "lockstep"
    return {
        ATTENTION: [] if layout == "colocated" else [ATTENTION] if alone else _numbered(ATTENTION, workers),
        COLOCATED: _numbered(COLOCATED, workers) if layout == "colocated" else [],
        EXPERTS: _numbered(EXPERTS, settings.disaggregated_experts),
    }


def device_of(settings: Settings, index: int) -> str:
    """Return the device of worker ``index`` of a machine: the GPU with that number, unless settings name a device."""
    return f"{settings.device}:{index}" if settings.device in ("auto", "cuda") else settings.device


def gpu_shares(settings: Settings, *, gpus: int, expert_worker_bytes: int) -> list[dict[str, object]]:
    """Return, for each worker of a machine, the settings by which those on one GPU divide its memory.

    Args:
        gpus: number of GPUs; 0: there are none, or it is not known.
        expert_worker_bytes: what an expert worker takes of its GPU.
    """
    roles = [role for role, names in computing(settings).items() for _ in names]
    numbers = [_gpu_of(device_of(settings, index), gpus) for index in range(len(roles))]
    shares: list[dict[str, object]] = []
    for role, number in zip(roles, numbers, strict=True):
        here = [other for other, its in zip(roles, numbers, strict=True) if its == number is not None]
        experts = here.count(EXPERTS)
        attention = len(here) - experts
        divided = role != EXPERTS and (experts or attention > 1)
        reserved = round(experts * expert_worker_bytes / 2**30, 3)
        shares.append({"gpu_workers": attention, "gpu_reserved_gib": reserved} if divided else {})
    return shares


def _gpu_of(device: str, gpus: int) -> int | None:
    """Return the number of the GPU that ``device`` names; one past the last is shared. None: it is none, or unknown."""
    kind, _, number = device.partition(":")
    return int(number) % gpus if gpus and kind in ("auto", "cuda") and number.isdigit() else None


def places(settings: Settings, pages: Sequence[int], shares: Sequence[Mapping[str, object]] = ()) -> list[Place]:
    """Return all workers of one machine, in order. The i-th has the i-th GPU; the i-th seat has the i-th port from
    --fabric-port on, and group i modulo the number of groups if the machine has seats for all groups.

    Args:
        pages: a port for each worker's page.
        shares: see :func:`gpu_shares`.
    """
    found: list[Place] = []
    groups = settings.expert_groups or 0
    names = [(name, role) for role, those in computing(settings).items() for name in those]
    for index, (name, role) in enumerate(names):
        number = sum(place.fabric_port is not None for place in found)
        found.append(
            Place(
                name=name,
                role=role,
                device=device_of(settings, index),
                metrics_port=pages[index],
                fabric_port=None if role == ATTENTION else settings.fabric_port and settings.fabric_port + number,
                expert_group=number % groups if role != ATTENTION and 0 < groups <= settings.seats else None,
                share=shares[index] if shares else {},
            )
        )
    return found


def _numbered(role: Role, count: int) -> list[str]:
    return [f"{role}-{number}" for number in range(count)]
