"""The routing table: which seat holds which experts. The scheduler writes it, every worker reads it. Torch-free.

An expert worker holds one seat. Seats are numbered once and never renumbered. The experts of the model are split into
shard groups, layer by layer; every seat of a group holds the whole group, so any of them may take its rows.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import cached_property, partial

import msgspec
from msgspec import structs

from services.errors import ConfigError
from services.wire import read


class Seat(msgspec.Struct, frozen=True, kw_only=True):
    """An expert worker's place. ``worker`` is its incarnation, ``node`` its machine, ``capacity`` a relative speed, and
    ``process`` its name in logs and metrics, if it has one."""

    number: int
    worker: str
    group: int
    host: str
    port: int
    node: str = ""
    capacity: float = 1.0
    process: str = ""

    @property
    def name(self) -> str:
        """The name by which people know the worker."""
        return self.process or self.worker

    @property
    def title(self) -> str:
        """The seat in log lines: its worker's name and its number."""
        return f"{self.name} (seat {self.number})"


class ShardGroup(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """``experts``: layer -> ids of the experts that every seat of the group holds, ascending."""

    number: int
    experts: dict[int, tuple[int, ...]]

    @cached_property
    def size(self) -> int:
        """How many experts the group has of a layer, at most."""
        return max(map(len, self.experts.values()), default=0)

    @cached_property
    def digest(self) -> str:
        """A name of the contents: 16 hexadecimal digits, the same in every process."""
        return hashlib.blake2b(encode_group(self), digest_size=8).hexdigest()


class RoutingTable(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """One version of the table. A table with a higher ``epoch`` replaces one with a lower epoch.

    Every expert of every layer is in exactly one group; a group may be without seats.
    """

    epoch: int
    fingerprint: str
    num_experts: int
    groups: tuple[ShardGroup, ...]
    seats: tuple[Seat, ...] = ()

    @cached_property
    def group_of(self) -> Mapping[int, tuple[int, ...]]:
        """Layer -> group number by expert id.

        Raises:
            ConfigError: an expert of a layer is in no group or in several.
        """
        found: dict[int, list[int]] = {}
        for group in self.groups:
            for layer, experts in group.experts.items():
                row = found.setdefault(layer, [-1] * self.num_experts)
                for expert in experts:
                    if row[expert] >= 0:
                        raise _misfit(f"expert {expert} of layer {layer} is in groups {row[expert]} and {group.number}")
                    row[expert] = group.number
        for layer, row in found.items():
            if -1 in row:
                raise _misfit(f"expert {row.index(-1)} of layer {layer} is in no group")
        return {layer: tuple(row) for layer, row in found.items()}

    @cached_property
    def seats_of(self) -> Mapping[int, tuple[Seat, ...]]:
        """Group number -> its seats in order of their numbers; () for a group without seats."""
        found: dict[int, list[Seat]] = {group.number: [] for group in self.groups}
        for seat in sorted(self.seats, key=lambda seat: seat.number):
            if seat.group in found:
                found[seat.group].append(seat)
        return {number: tuple(seats) for number, seats in found.items()}


def even_groups(layers: list[int], num_experts: int, groups: int) -> tuple[ShardGroup, ...]:
    """Return ``groups`` of consecutive experts, the same in every layer and as even as possible, before load is known.

    Raises:
        ConfigError: there are more groups than experts.
    """
    if not 1 <= groups <= num_experts:
        raise ConfigError(
            f"{num_experts} experts cannot be split into {groups} groups.", hint=f"Choose 1 to {num_experts}."
        )
    bounds = [number * num_experts // groups for number in range(groups + 1)]
    return tuple(
        ShardGroup(number=number, experts=dict.fromkeys(layers, tuple(range(bounds[number], bounds[number + 1]))))
        for number in range(groups)
    )


def encode_table(table: RoutingTable) -> bytes:
    return _encoder.encode(table)


def encode_group(group: ShardGroup) -> bytes:
    """Encode ``group``; equal groups have equal bytes."""
    return _encoder.encode(structs.replace(group, experts=dict(sorted(group.experts.items()))))


def _misfit(problem: str) -> ConfigError:
    return ConfigError(f"The routing table is inconsistent: {problem}.", hint="Let the scheduler write a new one.")


_encoder = msgspec.msgpack.Encoder()
# Each takes bytes, and raises UnreadableMessage.
decode_table = partial(read, msgspec.msgpack.Decoder(RoutingTable), "a routing table")
decode_group = partial(read, msgspec.msgpack.Decoder(ShardGroup), "a shard group")
