"""The link to experts in other processes, as the settings ask for it: over TCP, with NCCL or shared memory on top."""

from __future__ import annotations

from importlib.metadata import version

import torch

from moe_kernels.exchange.layout import Layout
from services.attention.setup.batch_size import BatchSize
from services.config import Settings
from services.fabric.nccl.lanes import lanes_for
from services.fabric.secret import read_secret
from services.fabric.shared_memory.link import SharedMemoryLink, SharedMemoryOptions
from services.fabric.shared_memory.open_memory import memory_for
from services.fabric.tcp.connect import Facts
from services.fabric.tcp.extension import ClientExtension
from services.fabric.tcp.frames import NAMES
from services.fabric.tcp.handshake import Hello
from services.fabric.tcp.link import TcpLink
from services.fabric.tcp.tls import ClientTls
from services.model.spec import ModelSpec
from services.routing import RoutingTable, even_groups
from services.runtime import node_name

SHARED_ROWS = 512
"""Most rows of a micro-batch that go through shared memory. Larger steps, which hold prompts, go over TCP or NCCL: they
are bound by the bytes that they move, not by how soon the first one leaves."""
COLOCATED_ROWS = 8192
"""Most rows in a colocated worker, whose own seat takes them on the same GPU: TCP would take them through the host."""
DEADLINE_S = 0.02
"""Longest wait for one exchange between GPUs, which takes some 10 us; between CPUs it is ``--exchange-timeout``."""
COLOCATED_DEADLINE_S = 0.25
"""Longest wait for a seat whose GPU computes attention, too: a prompt keeps that busy for hundreds of milliseconds."""


def remote_link(
    settings: Settings,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    worker: str,
    *,
    size: BatchSize,
    colocated: bool = False,
) -> TcpLink | SharedMemoryLink:
    """Return a link that has no seats yet: they come with the first routing table.

    Args:
        worker: this attention worker's incarnation.
        size: bounds the rows of a step.
        colocated: one of the seats is in this process, on the same device.

    Raises:
        ConfigError: the device cannot do what the settings ask for.
    """
    table = RoutingTable(
        epoch=0,
        fingerprint=spec.fingerprint,
        num_experts=spec.num_experts,
        groups=even_groups(list(spec.moe_layers), spec.num_experts, 1),
    )
    memory = memory_for(settings.fabric_shared, device, colocated=colocated)
    if memory is None:
        return _tcp_link(settings, spec, table, dtype, device, worker)
    host = memory.kind == "host"
    shared_gpu = colocated and not host
    return SharedMemoryLink(
        lambda extension: _tcp_link(settings, spec, table, dtype, device, worker, extension),
        table,
        memory=memory,
        device=device,
        layers=list(spec.moe_layers),
        layout=_layout(
            size,
            spec,
            dtype,
            rows=COLOCATED_ROWS if shared_gpu else SHARED_ROWS,
            unsummed=host or settings.batch_invariant,
        ),
        node=node_name(settings),
        options=SharedMemoryOptions(
            deadline_s=settings.exchange_timeout if host else DEADLINE_S,
            colocated_s=COLOCATED_DEADLINE_S,
            unavailable_s=settings.experts_timeout,
            shared_gpu=shared_gpu,
        ),
    )


def _layout(size: BatchSize, spec: ModelSpec, dtype: torch.dtype, *, rows: int, unsummed: bool) -> Layout:
    """Return the layout of shared memory for at most ``rows`` rows.

    Between CPUs answers come unsummed: float32 gives the same tokens as TCP. Batch-invariant ones do, too: which
    experts are together in a group, and so are summed there, changes.
    """
    return Layout(
        rows=min(max(size.max_num_seqs, size.max_num_batched_tokens), rows),
        hidden=spec.hidden_size,
        slots=spec.top_k,
        dtype=dtype,
        unsummed=unsummed,
    )


def _tcp_link(
    settings: Settings,
    spec: ModelSpec,
    table: RoutingTable,
    dtype: torch.dtype,
    device: torch.device,
    worker: str,
    extension: ClientExtension | None = None,
) -> TcpLink:
    assert settings.fabric_secret_file is not None, "load_settings requires it"
    facts = Facts(
        hello=Hello(
            fingerprint=spec.fingerprint,
            weights=spec.weights,
            worker=worker,
            hidden=spec.hidden_size,
            dtype=NAMES[dtype],
            package=version("expertmesh"),
            batch_invariant=settings.batch_invariant,
        ),
        secret=read_secret(settings.fabric_secret_file),
        tls=ClientTls(settings.fabric_tls_ca, settings.fabric_tls_name) if settings.fabric_tls_ca else None,
        lanes=lanes_for(settings.fabric_lane, device, required=settings.fabric_lane == "nccl"),
    )
    return TcpLink(
        table,
        facts,
        call_s=settings.exchange_timeout,
        unavailable_s=settings.experts_timeout,
        # where sums are rounded, low bits may differ by how they are made
        reduced=dtype != torch.float32 and not settings.batch_invariant,
        extension=extension,
    )
