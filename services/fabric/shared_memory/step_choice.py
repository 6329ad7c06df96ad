"""Chooses the seat of a group to which an attention worker sends its steps.

Attention workers see the same seats and choose without agreeing: clients of one seat have different places there, by
which they spread over the replicas.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from services.fabric.shared_memory.peers import SharedSeat


def seat_for(candidates: Sequence[SharedSeat]) -> SharedSeat:
    """Choose one of ``candidates`` (at least one) so that no device serves two clients while another serves none.

    Processes on one GPU run alternately: steps of two seats there would wait for each other in every layer.
    """
    taken: Counter[str] = Counter()
    turns = list[tuple[int, SharedSeat]]()
    for seat in sorted(candidates, key=lambda seat: seat.link.seat.number):
        turns.append((taken[seat.device], seat))
        taken[seat.device] += 1
    turns.sort(key=lambda turn: turn[0])
    return turns[turns[0][1].place % len(turns)][1]
