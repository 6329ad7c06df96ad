"""The link to experts in processes of their own, as the settings ask for it."""

from __future__ import annotations

from importlib.metadata import version

import torch

from moe_kernels.exchange.layout import Layout
from services.config import Settings
from services.fabric.nccl.lanes import lanes_for
from services.fabric.secret import read_secret
from services.fabric.shared_memory.link import SharedMemoryLink, SharedMemoryOptions
from services.fabric.shared_memory.memory import PeerMemory
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

MAX_SHARED_ROWS = 512
"""Of a micro-batch. Longer steps, prefill that is, are bound by their bytes and not by how soon these set out."""
MAX_ROWS_BESIDE = 8192
"""The same where this process has a seat, too: long steps would go through the connection to it."""
DEADLINE_S = 0.02
"""For an exchange between GPUs, which takes some 10 microseconds; on CPUs the experts themselves may take longer."""
DEADLINE_BESIDE_S = 0.25
"""The same of seats on GPUs that compute attention, too, and prompts of hundreds of milliseconds."""


def remote_link(
    settings: Settings,
    spec: ModelSpec,
    dtype: torch.dtype,
    device: torch.device,
    worker: str,
    *,
    beside_experts: bool = False,
) -> TcpLink | SharedMemoryLink:
    """Without seats: they come with the first routing table. ``beside_experts``: one of them is in this process.

    Raises:
        ConfigError: the device cannot do what the settings ask for.
    """
    table = RoutingTable(
        epoch=0,
        fingerprint=spec.fingerprint,
        num_experts=spec.num_experts,
        groups=even_groups(list(spec.moe_layers), spec.num_experts, 1),
    )
    memory = memory_for(settings.fabric_shared, device, colocated=beside_experts)
    if memory is None:
        return _tcp_link(settings, spec, table, dtype, device, worker)
    host = memory.kind == "host"
    return SharedMemoryLink(
        lambda extension: _tcp_link(settings, spec, table, dtype, device, worker, extension),
        table,
        memory=memory,
        device=device,
        layers=list(spec.moe_layers),
        layout=_layout(
            settings, spec, dtype, memory, MAX_ROWS_BESIDE if beside_experts and not host else MAX_SHARED_ROWS
        ),
        node=node_name(settings),
        options=SharedMemoryOptions(
            deadline_s=settings.exchange_timeout if host else DEADLINE_S,
            colocated_s=DEADLINE_BESIDE_S,
            unavailable_s=settings.experts_timeout,
            shared_gpu=beside_experts and not host,
        ),
    )


def _layout(settings: Settings, spec: ModelSpec, dtype: torch.dtype, memory: PeerMemory, most: int) -> Layout:
    """Between CPUs answers come unsummed, so that tokens in float32 are those of ``--fabric-shared off``."""
    return Layout(
        rows=min(max(settings.max_num_seqs, settings.max_num_batched_tokens), most),
        hidden=spec.hidden_size,
        slots=spec.top_k,
        dtype=dtype,
        unsummed=memory.kind == "host",
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
            worker=worker,
            hidden=spec.hidden_size,
            dtype=NAMES[dtype],
            package=version("expertmesh"),
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
        reduced=dtype != torch.float32,  # where sums are rounded, low bits may differ by how they are made
        extension=extension,
    )
