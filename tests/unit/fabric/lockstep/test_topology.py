"""Nodes, local ranks, relay pairs and the choice among replicas, for regular and irregular membership."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.errors import ConfigError
from services.fabric.lockstep.topology import Topology, replica_choice

SIZES = st.lists(st.integers(1, 5), min_size=1, max_size=5)


def of_sizes(sizes: list[int], pairs: int = 0) -> Topology:
    names = [str(node) for node, size in enumerate(sizes) for _ in range(size)]
    return Topology.of_nodes(dict(enumerate(names)), pairs=pairs)


def test_seats_by_node() -> None:
    topology = Topology.of_nodes({31: "b", 7: "a", 12: "b", 9: "c"})
    assert topology.nodes == ((7,), (9,), (12, 31))
    assert (topology.node(31), topology.local_rank(31), topology.neighbours(31)) == (2, 1, (12,))


def test_regular_membership_relays_between_equal_local_ranks() -> None:
    topology = of_sizes([4, 4, 4])
    assert not topology.gathers
    for seat in topology.seats:
        for node in {0, 1, 2} - {topology.node(seat)}:
            here, there = topology.relay(seat, node)
            assert here == seat
            assert topology.local_rank(there) == topology.local_rank(seat)


def test_the_example_of_the_docstring() -> None:
    topology = of_sizes([4, 3])
    assert topology.gathers
    assert topology.relay(3, 1) == (0, 4)
    assert topology.relay(6, 0) == (6, 2)
    assert topology.partners(3) == {}
    assert topology.partners(6) == {0: 2}


def test_one_pair_for_all_rows_of_two_nodes() -> None:
    topology = of_sizes([4] * 4, pairs=1)
    assert all(len(topology.relay_pairs(0, node)) == 1 for node in (1, 2, 3))
    assert {topology.relay_pairs(0, node)[0][0] for node in (1, 2, 3)} == {1, 2, 3}, "each by another local rank"


@given(SIZES, st.integers(0, 3))
def test_every_way_there_is_the_way_back(sizes: list[int], pairs: int) -> None:
    topology = of_sizes(sizes, pairs)
    for seat in topology.seats:
        for node in set(range(len(sizes))) - {topology.node(seat)}:
            here, there = topology.relay(seat, node)
            assert topology.node(here) == topology.node(seat)
            assert topology.node(there) == node
            assert topology.partners(here)[node] == there
            assert topology.partners(there)[topology.node(here)] == here
            assert (there, here) in topology.relay_pairs(node, topology.node(seat))


@given(SIZES, st.data())
def test_replicas_share_the_sources_evenly(sizes: list[int], data: st.DataObject) -> None:
    topology = of_sizes(sizes)
    holders = data.draw(st.lists(st.sampled_from(topology.seats), min_size=1, unique=True))
    chosen = {source: row[0] for source, row in replica_choice([holders], topology).items()}
    counts = Counter(chosen.values())
    assert set(counts) == set(holders)
    assert max(counts.values()) <= -(-len(topology.seats) // len(holders))
    assert all(chosen[holder] == holder for holder in holders)


def test_a_replica_of_the_own_node_comes_first() -> None:
    assert [row[0] for row in replica_choice([[0, 3]], of_sizes([3, 3])).values()] == [0, 0, 0, 3, 3, 3]


def test_no_seats() -> None:
    with pytest.raises(ConfigError, match="needs seats"):
        Topology.of_nodes({})
