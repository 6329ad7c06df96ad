"""What several roles share: buckets, labels, and series that each of them has."""

from __future__ import annotations

from typing import Literal

from prometheus_client import Counter

from services.metrics.series import Label, Series

LATENCY_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 120, 600)
TOKEN_TIME_BUCKETS_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 10)
STEP_BUCKETS_S = (0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.1, 0.25, 1, 10)
SHORT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.1, 0.5, 2.5)
WAIT_BUCKETS_S = (0.005, 0.025, 0.1, 0.25, 0.5, 1, 2.5, 10, 60)
TOKEN_COUNT_BUCKETS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536)
GPU_MEMORY = "Memory of this worker's GPU, by all processes on it: used, free."
ON_GPU = "with a GPU"
REFUSED_PEERS = "Connections between workers refused or closed because of the peer, by reason."
TOP_EXPERTS = 4
"""How many of a layer's busiest experts have a series of their own."""
TOP_TENANTS = 10
"""How many tenants have series of their own."""
ALL_LAYERS = "all"
"""Value of the label ``layer`` where all layers are counted together, that is without --layer-series."""

WeightSource = Literal["checkpoint", "peer", "host"]
CHECKPOINT: Literal["checkpoint"] = "checkpoint"
PEER: Literal["peer"] = "peer"
HOST: Literal["host"] = "host"
"""The memory of the host, where weights wait while a model sleeps."""

SHARD = Label("shard", "number of a shard group", most=1024)
LAYER = Label("layer", f"number of a decoder layer, or {ALL_LAYERS!r} without --layer-series", most=256)
GPU_STATE = Label("state", values=("used", "free"))
PEER_REASON = Label("reason", "code of the error, tls, crowded or error", most=32)
_KIND = Label(
    "kind", "kind of the message", values=("assignment", "event", "inbox", "load", "request", "seat", "table", "worker")
)


def unreadable(series: Series) -> Counter:
    """Return the counter of unreadable messages, which every role has that reads from Redis."""
    text = "Messages and records in Redis that could not be decoded, by kind; see `expertmesh queue unreadable`."
    return series.counter("unreadable_messages_total", text, _KIND)
