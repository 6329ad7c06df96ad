"""Checks, before anything starts, what would make the roles of a server end at once, and says what they will use.

In: settings with the checkpoint's folder. Out: an error that a role would raise, or a :class:`Preview`. Torch-free, so
that an answer comes within a second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from services.attention.setup.batch_size import BatchSize, batch_size
from services.attention.setup.capacity import USUAL_KV_GIB, Capacity, capacity
from services.attention.setup.recurrent import beside_states, state_bytes_beside
from services.attention.setup.supported import check_supported
from services.config import DenseFormat, ExpertFormat, Settings
from services.errors import ConfigError
from services.model.draft_spec import check_context, draft_spec
from services.model.held_experts import check_slices, expert_bytes, held_experts, kept_on_cpu
from services.model.held_linears import dense_bytes, held_linears, linears_kept_on_cpu
from services.model.load_spec import load_spec, tokenizer_file
from services.model.names import dense_shapes, expert_shapes
from services.model.spec import ModelSpec
from services.model.state_room import STATES_PER_SEQUENCE
from services.model.stored_kinds import StoredKinds
from services.model.tensor_entries import tensor_entries
from services.supervisor.gpus import Gpus, find_gpus
from services.supervisor.roster import computing, gpu_shares

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
EXPERT_WORKER_SPARE = 2 << 30
"""Bytes that an expert worker takes of its GPU besides weights: CUDA context, activations, exchange."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Preview:
    """What the server will use. Sizes in bytes; ``expert_format`` and ``linear_format`` are empty where experts and
    other linear layers are dense, and ``kept_bytes`` is what a CPU keeps at most beside others. ``kv_bytes`` and
    ``room`` are those of one attention worker, None where it measures its GPU first; ``size`` is None where only the
    worker knows its GPU. ``kv_token_bytes`` are those of one token, ``state_bytes`` those of one recurrent state, 0
    where the model has none."""

    device: str
    dtype: str
    parameters: int
    expert_parameters: int
    expert_format: str
    linear_format: str
    weight_bytes: int
    kept_bytes: int
    room: Capacity | None
    kv_bytes: int | None
    kv_token_bytes: int
    state_bytes: int
    size: BatchSize | None
    gpu_memory_utilization: float
    gpus: int
    expert_worker_bytes: int

    def lines(self) -> list[str]:
        """Return what a user wants to know before the first request."""
        held = f", held in {self.expert_format}" if self.expert_format else ""
        linears = f", other linear layers in {self.linear_format}" if self.linear_format else ""
        used = "experts" if self.expert_format else "of them"
        more = f", up to {_size(self.kept_bytes)} more once all {used} were used" if self.kept_bytes else ""
        return [
            f"device {self.device}, {self.dtype}: {_count(self.parameters)} parameters, "
            f"{_count(self.expert_parameters)} of them in experts{held}{linears} "
            f"({_size(self.weight_bytes)} of weights{more})",
            *self._kept_lines(),
            *self._kv_lines(),
            *self._state_lines(),
        ]

    def shares(self, settings: Settings) -> list[dict[str, object]]:
        """Return, for each worker, the settings by which those on one GPU divide its memory."""
        return gpu_shares(settings, gpus=self.gpus, expert_worker_bytes=self.expert_worker_bytes)

    def _kept_lines(self) -> list[str]:
        if not self.kept_bytes:
            return []
        experts = f"experts held in {self.expert_format}" if self.expert_format else ""
        linears = f"linear layers held in {self.linear_format}" if self.linear_format else ""
        held = " and ".join(filter(None, (experts, linears)))
        return [
            f"{held}: on a CPU what their products take is made as they are used, and kept, which takes up to "
            f"{_size(self.kept_bytes)} more, if that leaves a twentieth of the machine's memory"
        ]

    def _state_lines(self) -> list[str]:
        if not self.state_bytes:
            return []
        return [
            f"recurrent layers: {_size(self.state_bytes)} for each state, of which each of the requests in a batch has "
            f"{STATES_PER_SEQUENCE}, beside {_size(self.kv_token_bytes)} of keys and values for each token"
        ]

    def _kv_lines(self) -> list[str]:
        batch = "" if self.size is None else f"; up to {self.size.max_num_seqs} requests per batch (--max-num-seqs)"
        room = self.room
        if room is None or self.kv_bytes is None:
            return [
                "KV cache per attention worker: what weights and steps leave of "
                f"--gpu-memory-utilization {self.gpu_memory_utilization:g}{batch}"
            ]
        fit = room.kv_tokens // room.max_model_len
        return [
            f"KV cache per attention worker: {_size(self.kv_bytes)}, {room.kv_tokens:,} tokens{batch}",
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
    gpus = find()
    device = _device(settings.device, gpus)
    _check_gpus(settings, gpus)
    on_cpu = device == "cpu"
    check_supported(settings, spec, on_cpu=on_cpu)
    folder = None if settings.speculation is None else settings.speculation.folder
    draft = None if folder is None else _held(draft_spec(folder, spec, settings.model), folder, "auto", "dense")
    size = _batch(settings, None if on_cpu else min(gpus.memory)) if gpus.memory or on_cpu else None
    seqs = size.max_num_seqs if size is not None else 0
    size, kv_gib = _cache(settings, spec, size, on_cpu=on_cpu)
    kv_bytes = sum(model.kv_bytes(_BYTES[dtype]) for model in (spec, draft) if model is not None)
    blocks, room = _room(settings, spec, kv_bytes, kv_gib, seqs)
    if draft is not None and folder is not None:
        longest = settings.max_model_len or (spec.max_position if room is None else room.max_model_len)
        check_context(draft, folder, longest)
    tokenizer_file(settings.model)
    spec = _held(spec, settings.model, settings.held_experts, settings.dense_format)
    if settings.layout == "lockstep":
        check_slices(spec, settings.expert_slices)
    experts = sum(map(math.prod, expert_shapes(spec).values()))
    dense = sum(map(math.prod, dense_shapes(spec).values()))
    expert_nbytes = expert_bytes(spec, _BYTES[dtype])
    groups = settings.expert_groups or max(1, settings.seats)
    return Preview(
        device=device,
        dtype=dtype,
        parameters=experts + dense,
        expert_parameters=experts,
        expert_format=spec.experts.label,
        linear_format=spec.linears.label,
        weight_bytes=dense_bytes(spec, _BYTES[dtype]) + expert_nbytes + _draft_bytes(draft, _BYTES[dtype]),
        kept_bytes=kept_on_cpu(spec, dtype) + linears_kept_on_cpu(spec, dtype) if device == "cpu" else 0,
        room=room,
        kv_bytes=blocks and blocks * settings.block_size * kv_bytes,
        kv_token_bytes=kv_bytes,
        state_bytes=spec.state_bytes,
        size=size,
        gpu_memory_utilization=settings.gpu_memory_utilization,
        gpus=0 if device == "cpu" else len(gpus.names),
        expert_worker_bytes=-(-expert_nbytes // groups) + EXPERT_WORKER_SPARE,
    )


def _held(spec: ModelSpec, folder: Path, expert_format: ExpertFormat, dense_format: DenseFormat) -> ModelSpec:
    """Return ``spec`` with how its experts and its other linear layers are held.

    Raises:
        ConfigError: experts cannot be held so.
        CheckpointError: the checkpoint is damaged or not supported.
    """
    stored = StoredKinds(*tensor_entries(folder, spec))
    experts = held_experts(spec, expert_format, stored, folder)
    return dataclasses.replace(spec, experts=experts, linears=held_linears(spec, dense_format, stored))


def _draft_bytes(draft: ModelSpec | None, itemsize: int) -> int:
    return 0 if draft is None else dense_bytes(draft, itemsize) + expert_bytes(draft, itemsize)


def _cache(
    settings: Settings, spec: ModelSpec, size: BatchSize | None, *, on_cpu: bool
) -> tuple[BatchSize | None, float | None]:
    """Return the batch, and the GiB of the KV cache beside recurrent states; None where the worker measures its GPU
    first. Raises ConfigError."""
    memory_gib = USUAL_KV_GIB if on_cpu and settings.kv_memory_gib is None else settings.kv_memory_gib
    if memory_gib is None or size is None or settings.kv_blocks:
        return size, memory_gib
    asked = settings.max_num_seqs is not None
    return beside_states(spec, size, memory_gib, asked=asked)


def _batch(settings: Settings, gpu_bytes: int | None) -> BatchSize:
    return batch_size(seqs=settings.max_num_seqs, tokens=settings.max_num_batched_tokens, gpu_bytes=gpu_bytes)


def _room(
    settings: Settings, spec: ModelSpec, kv_bytes: int, memory_gib: float | None, seqs: int
) -> tuple[int | None, Capacity | None]:
    """Return the KV blocks and what they hold; None where the worker measures its GPU first.

    Args:
        kv_bytes: what keys and values of a token take.
        seqs: of a batch, before states are counted.

    Raises:
        ConfigError: the length that was asked for does not fit, or never can.
    """
    block_bytes = settings.block_size * kv_bytes
    blocks = settings.kv_blocks or (None if memory_gib is None else _blocks(memory_gib, block_bytes))
    asked, size = settings.max_model_len, settings.block_size
    found = capacity(
        kv_blocks=blocks or -(-spec.max_position // size),
        block_size=size,
        block_bytes=block_bytes,
        asked=asked,
        max_position=spec.max_position,
        beside=lambda pages: state_bytes_beside(spec, seqs, pages, asked=settings.max_num_seqs is not None),
    )
    return blocks, found if blocks else None


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
