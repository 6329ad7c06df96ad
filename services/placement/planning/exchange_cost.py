"""Time that exchanging a layer's rows takes among ranks on several nodes: flat or hierarchical, alpha and beta.

    n nodes of L ranks, p = n L; every rank has T rows that choose K of E experts, E / p on each rank; D a bytes a row,
    s bytes for its choices; m messages of a rank each way, split into those inside the node and across nodes

    hit(g) = 1 - C(E - g, K) / C(E, K)       chance that a row chooses one of g experts
    flat           out     T hit(E/p) (p - L) rows across from each rank    m = (L - 1) + (p - L)
                   back    T K (p - L) / p rows, one for each choice
    hierarchical   out     T hit(E/n) (n - 1) rows across from each rank    m = 2 (L - 1) + (n - 1)
                   back    as many rows

    carrying  = max(L x bytes across / beta_across, bytes inside / beta_node)
    handling  = (o m + b x bytes of a rank) p / c
    time      = 3 alpha_across + 2 hops alpha_node + max(carrying, handling) + min(carrying, handling) / 2

alpha: seconds until an empty message arrives; three, since the first one waits until the receiver has said that it is
ready. beta: bytes per second of a rank inside its node, and of a whole node across nodes, which its ranks share. o, b:
processor seconds for each message and each byte sent, both ends together, where the p ranks share c processors: what
links carry and what processors handle overlaps. Hierarchical has two hops inside the node each way. Torch-free.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import comb
from typing import Literal

from services.errors import ConfigError

CHOICE_BYTES = 8
HEADER_BYTES = 8
TRIPS = 3
"""Messages one after the other: ready, out, back."""
ALONE = 0.5
"""Share of the lesser of carrying and handling that does not overlap with the other, measured on simulated nodes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nodes:
    """Nodes and their links: latency in seconds and bytes per second, ``across`` of one node, ``inside`` of one rank.

    ``message_s``, ``byte_s``: processor seconds to hand one message, one byte, from rank to rank; ``ranks_at_once``:
    how many ranks have a processor at a time (None: all).
    """

    count: int
    ranks: int
    across_latency: float
    across_bandwidth: float
    inside_latency: float
    inside_bandwidth: float
    message_s: float = 0.0
    byte_s: float = 0.0
    ranks_at_once: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Rows:
    """The rows to exchange: ``tokens`` of each rank in one step, ``row_bytes`` each."""

    tokens: int
    row_bytes: int
    experts: int
    top_k: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Cost:
    """Cost of one layer's exchange, there and back. ``messages`` and ``bytes`` are those of all ranks."""

    seconds: float
    messages_across: float
    messages_inside: float
    bytes_across: float
    bytes_inside: float


def exchange_cost(way: Literal["flat", "hierarchical"], nodes: Nodes, rows: Rows) -> Cost:
    """Return the cost by the equations of the module's docstring.

    Raises:
        ConfigError: a figure cannot be.
    """
    _check(nodes, rows)
    ranks = nodes.count * nodes.ranks
    if way == "flat":
        to = ranks - nodes.ranks
        out, back = rows.tokens * _hit(rows, ranks) * to, rows.tokens * rows.top_k * to / ranks
        inside, hops, inner_messages, outer_messages = _inside(nodes, rows), 0, nodes.ranks - 1, to
    else:
        to = nodes.count - 1
        out = back = rows.tokens * _hit(rows, nodes.count) * to
        inside, hops, inner_messages, outer_messages = 2 * _inside(nodes, rows), 2, 2 * (nodes.ranks - 1), to
    bytes_out = out * (rows.row_bytes + CHOICE_BYTES * rows.top_k) + HEADER_BYTES * outer_messages
    bytes_back = back * rows.row_bytes
    link = nodes.ranks * (bytes_out + bytes_back) / nodes.across_bandwidth if to else 0.0
    crossing = TRIPS * nodes.across_latency if to else 0.0
    latency = crossing + (2 * hops or TRIPS * (not to)) * nodes.inside_latency
    messages = inner_messages + outer_messages
    at_once = min(nodes.ranks_at_once or ranks, ranks)
    bytes_inside = inside * (2 * rows.row_bytes + CHOICE_BYTES * rows.top_k)
    carrying = max(link, bytes_inside / nodes.inside_bandwidth)
    moved = bytes_out + bytes_back + bytes_inside
    handling = (2 * messages * nodes.message_s + moved * nodes.byte_s) * ranks / at_once
    return Cost(
        seconds=latency + max(carrying, handling) + ALONE * min(carrying, handling),
        messages_across=2 * ranks * outer_messages,
        messages_inside=2 * ranks * inner_messages,
        bytes_across=ranks * (bytes_out + bytes_back),
        bytes_inside=ranks * bytes_inside,
    )


def _hit(rows: Rows, parts: int) -> float:
    """Return the chance that a row chooses an expert of one of ``parts`` equal parts."""
    others = rows.experts - max(rows.experts // parts, 1)
    return 1 - comb(others, rows.top_k) / comb(rows.experts, rows.top_k)


def _inside(nodes: Nodes, rows: Rows) -> float:
    """Return how many rows of one rank go to other ranks of its node."""
    return rows.tokens * _hit(rows, nodes.count * nodes.ranks) * (nodes.ranks - 1)


def _check(nodes: Nodes, rows: Rows) -> None:
    figures = {name: getattr(part, name) for part in (nodes, rows) for name in part.__slots__}
    for name, value in figures.items():
        if value is not None and (value < 0 or (value == 0 and "latency" not in name and not name.endswith("_s"))):
            raise ConfigError(f"An exchange with {name} = {value} cannot be.", hint="Give a figure above 0.")
    if rows.top_k > rows.experts:
        raise ConfigError(f"A token cannot choose {rows.top_k} of {rows.experts} experts.", hint="Check the model.")
