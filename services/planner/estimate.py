"""What a decode step takes in each layout, and what the memory of GPUs holds, from a model's spec and what was asked.

Weights, keys and values are taken to have 16 bits, but for experts and linear layers that are held quantised.
"""

from __future__ import annotations

import math
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass

from services.model.held_experts import expert_bytes
from services.model.held_linears import dense_bytes
from services.model.names import EMBED, dense_shapes, expert_shapes
from services.model.spec import ModelSpec
from services.model.state_room import FIRST_SLOT, STATES_PER_SEQUENCE
from services.placement import Batch, DoesNotFit, Gpus, Kernels, Link, Mode, Shapes, choose_mode
from services.placement.planning.exchange_cost import Cost, Nodes, Rows, exchange_cost
from services.placement.planning.layer_times import ACTIVATION_BYTES
from services.planner.figures import (
    ATTENTION_S,
    EXPERT_TIMES,
    KINDS,
    REACHED_BANDWIDTH,
    REACHED_FLOPS,
    REACHED_LINK,
    ROW_S,
    SHARED_ROWS,
    USED_MEMORY,
)

_WEIGHT_BYTES = 2
_BLOCK = 16
"""Tokens of a KV block, by default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """What one GPU holds. ``weights``: bytes, of a GPU with attention; ``expert_weights``: of one with experts alone, 0
    where there is none. ``kv_gib``: memory for the KV cache of a GPU with attention, which has room for ``requests`` of
    the context that was asked for."""

    weights: float
    expert_weights: float
    kv_gib: int
    requests: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """A batch size, tokens of a decode step of all GPUs, and the fastest layout for it.

    ``step_s``: seconds of a step colocated, disaggregated and in ping-pong, inf where it does not fit. ``attention``:
    GPUs with attention.
    """

    batch: int
    mode: Mode
    step_s: Sequence[float]
    attention: int
    memory: Memory

    @property
    def best_s(self) -> float:
        return min(self.step_s)

    @property
    def tokens_s(self) -> float:
        """Tokens per second in the fastest layout."""
        return self.batch / self.best_s


def row(spec: ModelSpec, given: Namespace, batch: int) -> Row:
    """Return the estimate for ``batch`` tokens a step.

    Raises:
        DoesNotFit: neither layout holds the model and so many requests.
        ConfigError: a figure is not above 0.
    """
    mode = _mode(spec, given, batch)
    attention = given.gpus if mode.choice == "colocated" else mode.attention
    held = _memory(spec, given, mode)
    if held.requests * attention < batch:  # blocks, requests and GiB are whole, unlike in the equations
        raise DoesNotFit(f"A batch of {batch} does not fit.", hint="Use more or larger GPUs, or smaller batches.")
    step_s = [len(spec.moe_layers) * layer_s for layer_s in (mode.colocated_s, mode.disaggregated_s, mode.pingpong_s)]
    return Row(batch=batch, mode=mode, step_s=step_s, attention=attention, memory=held)


def weights(spec: ModelSpec) -> tuple[int, int]:
    """Return how many weights are attention's and the like, and how many experts'."""
    dense, experts = (sum(map(math.prod, shapes(spec).values())) for shapes in (dense_shapes, expert_shapes))
    return dense, experts


def held_bytes(spec: ModelSpec) -> tuple[int, int]:
    """Return the bytes of attention's weights and the like, and of experts', as they are held."""
    return dense_bytes(spec, _WEIGHT_BYTES), expert_bytes(spec, _WEIGHT_BYTES)


def expert_times(kind: str) -> tuple[tuple[float, float], ...]:
    """Return the times of experts that are held in ``kind``, over 16 bits, by rows of an expert; () where there are
    none. An order of columns costs a copy of the rows, which is not counted."""
    return EXPERT_TIMES.get(kind.removesuffix("-order"), ())


def usual_kind(spec: ModelSpec) -> str:
    """Return how the experts of most layers are held."""
    kinds = [str(spec.experts.of(layer) or "") for layer in spec.moe_layers]
    return max(sorted(set(kinds)), key=kinds.count)


def kv_bytes(spec: ModelSpec, given: Namespace) -> float:
    """Return the bytes of a request's keys and values, in whole blocks, and of its recurrent states, which take half of
    that memory at most."""
    pages = spec.kv_bytes(ACTIVATION_BYTES) * _BLOCK * math.ceil(given.context / _BLOCK)
    states = STATES_PER_SEQUENCE * spec.state_bytes
    return float(max(pages, states) + states)


def inside(given: Namespace) -> Link:
    """Return the link between GPUs of one node: memory that seats share, as expert workers do."""
    gb = KINDS[given.gpu].link * REACHED_LINK / 1e9 if given.link_gb is None else given.link_gb
    return Link(bandwidth=gb * 1e9, latency=given.link_us / 1e6, joined=False, rows=SHARED_ROWS)


def between(spec: ModelSpec, given: Namespace, tokens: int) -> Link:
    """Return the link between any two GPUs. Across nodes it has the bandwidth with which the flat exchange would be as
    fast as the best one."""
    if given.nodes == 1:
        return inside(given)
    flat, hierarchical = exchanges(spec, given, tokens)
    gain = max(flat.bytes_across / hierarchical.bytes_across, 1.0) if hierarchical.seconds < flat.seconds else 1.0
    return Link(bandwidth=given.across_gb * 1e9 * gain, latency=given.across_us / 1e6)


def exchanges(spec: ModelSpec, given: Namespace, tokens: int) -> tuple[Cost, Cost]:
    """Return the cost of the flat and of the hierarchical exchange, where all GPUs share one copy of the experts."""
    ranks, link = given.gpus // given.nodes, inside(given)
    nodes = Nodes(
        count=given.nodes,
        ranks=ranks,
        across_latency=given.across_us / 1e6,
        across_bandwidth=given.across_gb * 1e9 * ranks,
        inside_latency=link.latency,
        inside_bandwidth=link.bandwidth,
    )
    rows = Rows(
        tokens=max(tokens // given.gpus, 1),
        row_bytes=spec.hidden_size * ACTIVATION_BYTES,
        experts=spec.num_experts,
        top_k=spec.top_k,
    )
    return exchange_cost("flat", nodes, rows), exchange_cost("hierarchical", nodes, rows)


def in_one_node(degree: int, given: Namespace) -> bool:
    """Return whether every ``degree`` GPUs that share experts are of one node: they have seats, others lock-step."""
    return bool(given.gpus // given.nodes % degree == 0)


def _mode(spec: ModelSpec, given: Namespace, tokens: int) -> Mode:
    layers = len(spec.moe_layers)
    shapes = Shapes(
        hidden=spec.hidden_size,
        expert_width=spec.expert_ffn,
        experts=spec.num_experts,
        top_k=spec.top_k,
        layers=layers,
        weight_bytes=_WEIGHT_BYTES,
        experts_held=expert_bytes(spec, _WEIGHT_BYTES) / layers,
        experts_time=expert_times(usual_kind(spec)),
        dense_weights=(weights(spec)[0] - _looked_up(spec))
        // layers,  # with a share of head and layers without experts
        dense_held=(dense_bytes(spec, _WEIGHT_BYTES) - _WEIGHT_BYTES * _looked_up(spec)) / layers,
    )
    kind = KINDS[given.gpu]
    gpus = Gpus(
        count=given.gpus,
        bandwidth=kind.bandwidth * REACHED_BANDWIDTH,
        flops=kind.flops * REACHED_FLOPS,
        memory=max(1.0, _usable(given) - _WEIGHT_BYTES * _looked_up(spec)),
        kernels=Kernels(attention_s=ATTENTION_S, row_s=ROW_S),
    )
    link = between(spec, given, tokens)
    lockstep = Link(bandwidth=link.bandwidth, latency=max(given.lockstep_us / 1e6, link.latency))

    def together(degree: int) -> Link:
        return inside(given) if in_one_node(degree, given) else lockstep

    batch = Batch(tokens=tokens, kv_bytes=kv_bytes(spec, given) / layers, skew=given.skew)
    # between GPUs of one node steps are CUDA graphs, and there are none of two micro-batches
    return choose_mode(shapes, link, gpus, batch, together=together, pingpong=given.nodes > 1)


def _usable(given: Namespace) -> float:
    return KINDS[given.gpu].memory * USED_MEMORY


def _looked_up(spec: ModelSpec) -> int:
    """Return the weights of which a row reads a line: embeddings that are not the output head, too."""
    return 0 if spec.tie_embeddings else math.prod(dense_shapes(spec)[EMBED])


def _memory(spec: ModelSpec, given: Namespace, mode: Mode) -> Memory:
    dense, experts = held_bytes(spec)
    parts = mode.degree if mode.choice == "colocated" else mode.experts
    share = experts * math.ceil(spec.num_experts / parts) / spec.num_experts
    held = dense + share if mode.choice == "colocated" else dense
    apart = 0.0 if mode.choice == "colocated" else share
    room = 0.0 if apart > _usable(given) else max(0.0, _usable(given) - held)
    kv_gib = int(room / 2**30)
    nobodys = 2 * FIRST_SLOT * spec.state_bytes  # and as much that is no state
    return Memory(
        weights=held,
        expert_weights=apart,
        kv_gib=kv_gib,
        requests=max(0, int((kv_gib * 2**30 - nobodys) / kv_bytes(spec, given))),
    )
