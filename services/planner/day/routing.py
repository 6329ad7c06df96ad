"""Which share of a topic's rows each shard group takes.

The file is JSON, such as the pocket model's records/load.json: {"counts": {topic: one list for each layer of one count
for each expert}}. Groups are even, by the experts' numbers, as a server's first ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec

from services.errors import ConfigError
from services.routing import even_groups


class _Routing(msgspec.Struct):
    counts: dict[str, list[list[float]]]


def even_shares(topics: int, shards: int) -> list[list[float]]:
    """Return equal shares of the rows, where nothing is known."""
    return [[1 / shards] * shards for _ in range(max(1, topics))]


def read_shares(path: Path, topics: Sequence[str], shards: int) -> list[list[float]]:
    """Return topic -> shard -> share of the rows, mean over layers.

    Raises:
        ConfigError: the file has another form, a topic is not in it, or the shards do not divide the experts.
    """
    try:
        counts = msgspec.json.decode(path.expanduser().read_bytes(), type=_Routing).counts
    except OSError as error:
        raise ConfigError(f"Cannot read the routing {path}: {error.strerror}.") from error
    except msgspec.MsgspecError as error:
        raise ConfigError(
            f"The routing {path} is not usable: {error}.",
            hint='It is {"counts": {topic: [[rows of each expert] of each layer]}}.',
        ) from error
    if unknown := [topic for topic in topics if topic not in counts]:
        raise ConfigError(
            f"The routing {path} lacks the topics {', '.join(unknown)} of the trace.",
            hint=f"It has {', '.join(counts) or 'none'}.",
        )
    return [_shares(path, topic, counts[topic], shards) for topic in topics] or even_shares(0, shards)


def check_shards(shards: int, experts: int) -> None:
    """Raises ConfigError where ``experts`` of a layer cannot be split evenly."""
    if shards > experts or experts % shards:
        fitting = ", ".join(str(count) for count in range(1, experts + 1) if experts % count == 0)
        raise ConfigError(
            f"{experts} experts of a layer cannot be split evenly over {shards} shards.", hint=f"Choose {fitting}."
        )


def _shares(path: Path, topic: str, layers: Sequence[Sequence[float]], shards: int) -> list[float]:
    experts = len(layers[0]) if layers else 0
    if not experts or any(len(row) != experts or sum(row) <= 0 or min(row) < 0 for row in layers):
        raise ConfigError(
            f"The routing {path}: topic {topic} lacks counts.", hint="Each layer has one count for each expert."
        )
    check_shards(shards, experts)
    groups = even_groups(list(range(len(layers))), experts, shards)
    return [
        sum(sum(row[expert] for expert in group.experts[at]) / sum(row) for at, row in enumerate(layers)) / len(layers)
        for group in groups
    ]
