"""Ranks as processes on simulated nodes, timed: flat against hierarchical, on links of any rate and delay.

Each node is a network namespace, its ranks share its cable. Ranks are forked, so that sixteen start in a moment.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

from services.fabric.lockstep.build import LockstepShape, Way, lockstep_link
from services.fabric.lockstep.gloo import GlooWire, gloo_group
from services.placement import place_experts
from services.placement.planning.exchange_cost import Nodes, Rows
from testkit.processes.netns import Host, open_network

PORT = 7300
TIMEOUT_S = 120.0
WARM_UP = 4
CLONE_NEWNET = 0x40000000


@dataclass(frozen=True, kw_only=True)
class Case:
    """``mbit`` and ``delay_s`` of each node's cable, in each direction; None and 0: as fast as the machine."""

    nodes: int
    ranks: int
    rows: Rows
    mbit: float | None = None
    delay_s: float = 0.0
    repeats: int = 15


@dataclass(frozen=True, kw_only=True)
class Measured:
    """Of one layer and all ranks, both ways; ``seconds`` from one layer to the next, at the
    20th percentile: what else runs on the machine counts least there."""

    seconds: float
    messages_across: float
    messages_inside: float
    bytes_across: float


def measure(case: Case) -> dict[Way, Measured]:
    """Both exchanges of the same rows by the same processes."""
    with open_network() as network:
        hosts = [network.host(f"node-{number}") for number in range(case.nodes)]
        for host in hosts:
            host.cable.limit(case.mbit)
            if case.delay_s:
                host.cable.delay(case.delay_s)
        return _run(case, hosts)


def _run(case: Case, hosts: Sequence[Host]) -> dict[Way, Measured]:
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe(duplex=False)
    ranks = case.nodes * case.ranks
    processes = [context.Process(target=_rank, args=(rank, case, hosts, there), daemon=True) for rank in range(ranks)]
    for process in processes:
        process.start()
    try:
        assert here.poll(TIMEOUT_S * 2), "the ranks did not finish in time"
        found: dict[Way, Measured] = here.recv()
    finally:
        for process in processes:
            process.join(5)
            process.kill()
    return found


def _rank(rank: int, case: Case, hosts: Sequence[Host], done: Connection) -> None:
    torch.set_num_threads(1)
    host = hosts[rank // case.ranks]
    _enter(host.namespace)
    store = TCPStore(hosts[0].address, PORT, is_master=rank == 0, wait_for_workers=False)
    names = tuple(hosts[other // case.ranks].name for other in range(case.nodes * case.ranks))
    group = gloo_group(PrefixStore("m", store), rank, len(names), host=host.address, timeout_s=TIMEOUT_S)
    near = [other for other, name in enumerate(names) if name == host.name]
    wire = GlooWire(group, near=near, timeout_s=TIMEOUT_S)
    found = {way: _timed(way, case, wire, names) for way in ("flat", "hierarchical")}
    if rank == 0:
        done.send(found)
    wire.agree([1])  # rank 0 keeps the store until all are done
    os._exit(0)


def _timed(way: Any, case: Case, wire: GlooWire, names: tuple[str, ...]) -> Measured:
    rows = case.rows
    placement = place_experts({0: [1.0] * rows.experts}, len(names), -(-rows.experts // len(names)))
    link = lockstep_link(
        wire,
        {0: lambda x_TD, _ids, _weights: x_TD},
        placement=placement,
        num_experts=rows.experts,
        shape=LockstepShape(nodes=names, way=way),
        max_rows=rows.tokens,
    )
    generator = torch.Generator().manual_seed(wire.rank)
    x_TD = torch.zeros(rows.tokens, rows.row_bytes // 4)
    weights_TK = torch.ones(rows.tokens, rows.top_k)
    before, times = _sent(wire), [0.0]
    for _ in range(WARM_UP + case.repeats):
        ids_TK = torch.rand(rows.tokens, rows.experts, generator=generator).topk(rows.top_k, dim=1).indices
        link.combine(link.dispatch(0, x_TD, ids_TK, weights_TK))
        times.append(time.perf_counter())
    sent = wire.agree([now - then for now, then in zip(_sent(wire), before, strict=True)])
    gaps = [now - then for then, now in pairwise(times[WARM_UP:])]
    usual_ns = wire.agree([int(sorted(gaps)[len(gaps) // 5] * 1e9)])[0] / len(names)
    across, inside, nbytes = (count / (WARM_UP + case.repeats) for count in sent)
    return Measured(seconds=usual_ns / 1e9, messages_across=across, messages_inside=inside, bytes_across=nbytes)


def _sent(wire: GlooWire) -> list[int]:
    return [wire.traffic.messages["across"], wire.traffic.messages["node"], wire.traffic.bytes["across"]]


def _enter(namespace: str) -> None:
    """Of the calling process alone; what it opens from now on is on that host."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/run/netns/{namespace}") as file:
        if libc.setns(file.fileno(), CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    # A connection that was idle for a while would begin slowly again, which links between nodes that are in use do not.
    Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle").write_text("0")


def expected_nodes(case: Case, machine: Nodes) -> Nodes:
    """The nodes of ``case`` for the model: a cable at each end of the way; processors as ``machine`` says."""
    return replace(
        machine,
        across_latency=2 * case.delay_s,
        across_bandwidth=1e12 if case.mbit is None else case.mbit * 1e6 / 8,
    )
