"""Checks, before anything starts, what would make the roles of a server end at once, and says what they will use.

In: settings with the checkpoint's folder. Out: an error that a role would raise, or a :class:`Preview`. Torch-free, so
that an answer comes within a second.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from services.attention.setup.capacity import Capacity, capacity
from services.config import Settings
from services.errors import ConfigError
from services.model.load_spec import load_spec, tokenizer_file
from services.model.names import dense_shapes, expert_shapes
from services.model.spec import ModelSpec
from services.model.tensor_entries import tensor_entries
from services.supervisor.gpus import Gpus, find_gpus
from services.supervisor.roster import computing

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """What the server will use. Sizes in bytes; ``kv_bytes`` and ``room`` are those of one attention worker."""

    device: str
    dtype: str
    parameters: int
    expert_parameters: int
    room: Capacity
    kv_bytes: int
    max_num_seqs: int

    def lines(self) -> list[str]:
        """Return what a user wants to know before the first request."""
        each, room = _BYTES[self.dtype], self.room
        fit = room.kv_tokens // room.max_model_len
        return [
            f"device {self.device}, {self.dtype}: {_count(self.parameters)} parameters, "
            f"{_count(self.expert_parameters)} of them in experts ({_size(self.parameters * each)} of weights)",
            f"KV cache per attention worker: {_size(self.kv_bytes)}, {room.kv_tokens:,} tokens; up to "
            f"{self.max_num_seqs} requests per batch (--max-num-seqs)",
            f"longest context: {room.max_model_len:,} tokens (prompt and answer); the KV cache holds {fit} of these",
        ]


def preflight(settings: Settings, find: Callable[[], Gpus] = find_gpus) -> Preview:
    """Return what a server with ``settings`` will use. Reads no weights, only their names and shapes.

    Raises:
        ConfigError: a setting contradicts the model or the machine.
        CheckpointError: the checkpoint is damaged or not supported.
    """
    assert settings.model is not None, "checked before"
    spec = load_spec(settings.model)
    _check_groups(settings, spec)
    dtype = spec.dtype if settings.dtype == "auto" else settings.dtype
    block_bytes = settings.block_size * spec.kv_bytes(_BYTES[dtype])
    blocks = settings.kv_blocks or _blocks(settings.kv_memory_gib, block_bytes)
    room = capacity(
        kv_blocks=blocks, block_size=settings.block_size, asked=settings.max_model_len, max_position=spec.max_position
    )
    gpus = find()
    device = _device(settings.device, gpus)
    _check_gpus(settings, gpus)
    tokenizer_file(settings.model)
    tensor_entries(settings.model, spec)
    experts = sum(map(math.prod, expert_shapes(spec).values()))
    return Preview(
        device=device,
        dtype=dtype,
        parameters=experts + sum(map(math.prod, dense_shapes(spec).values())),
        expert_parameters=experts,
        room=room,
        kv_bytes=blocks * block_bytes,
        max_num_seqs=settings.max_num_seqs,
    )


def _blocks(memory_gib: float, block_bytes: int) -> int:
    blocks = int(memory_gib * 2**30) // block_bytes
    if not blocks:
        raise ConfigError(
            f"--kv-memory-gib {memory_gib} is less than one KV block, which takes {_size(block_bytes)}.",
            hint="Raise it.",
        )
    return blocks


def _check_groups(settings: Settings, spec: ModelSpec) -> None:
    seats = settings.seats if settings.layout == "colocated" else 0
    groups = settings.expert_groups or seats
    if groups > spec.num_experts:
        raise ConfigError(
            f"The {spec.num_experts} experts of a layer cannot be split into {groups} shard groups.",
            hint=f"Give at most --expert-groups {spec.num_experts}: workers beyond it are replicas.",
        )


def _device(asked: str, gpus: Gpus) -> str:
    """Return the device by its name. Raises ConfigError where ``asked`` is a GPU that is not there."""
    kind, _, number = asked.partition(":")
    if kind == "cuda" and gpus.missing is not None:
        raise ConfigError(f"--device {asked} cannot be used: {gpus.missing}.", hint="Try --device cpu or auto.")
    if kind == "cuda" and gpus.names and number.isdigit() and int(number) >= len(gpus.names):
        raise ConfigError(
            f"--device {asked} cannot be used: GPUs here are cuda:0 to cuda:{len(gpus.names) - 1}.",
            hint="Choose one of them, or --device auto.",
        )
    if kind not in ("auto", "cuda") or (not gpus.names and gpus.missing is None):
        return asked
    if not gpus.names:
        return "cpu"
    return f"{asked} ({gpus.names[int(number)]})" if number.isdigit() else f"cuda ({_together(gpus.names)})"


def _check_gpus(settings: Settings, gpus: Gpus) -> None:
    """Raise ConfigError where workers would get GPUs that are not there: each has one of its own."""
    workers = sum(map(len, computing(settings).values()))
    if settings.device == "cuda" and gpus.names and workers > len(gpus.names):
        raise ConfigError(
            f"{workers} workers need as many GPUs, and there are {len(gpus.names)}.",
            hint="Start fewer workers, or let them share GPUs with --device auto.",
        )


def _together(names: tuple[str, ...]) -> str:
    counts = {name: names.count(name) for name in names}
    return ", ".join(f"{count} x {name}" if count > 1 else name for name, count in counts.items())


def _count(number: int) -> str:
    for unit, letter in ((10**9, "billion"), (10**6, "million")):
        if number >= unit:
            return f"{number / unit:.3g} {letter}"
    return f"{number:,}"


def _size(nbytes: int) -> str:
    return f"{nbytes / 2**30:.3g} GiB" if nbytes >= 2**29 else f"{nbytes / 2**20:.3g} MiB"
