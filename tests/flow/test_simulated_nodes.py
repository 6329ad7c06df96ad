"""Flat and hierarchical exchange between network namespaces: what crosses, counted and as the model has it."""

from __future__ import annotations

import pytest
from testkit.processes.iproute import delay_obstacle, obstacle
from testkit.processes.simulated_nodes import Case, expected_nodes, measure

from services.placement.planning.exchange_cost import Nodes, Rows, exchange_cost

pytestmark = [pytest.mark.alone, pytest.mark.night]

FAST = Nodes(count=2, ranks=2, across_latency=0.0, across_bandwidth=1e12, inside_latency=0.0, inside_bandwidth=1e12)


def test_hierarchical_sends_less_across_a_slow_link() -> None:
    if (reason := obstacle() or delay_obstacle()) is not None:
        pytest.skip(f"hosts as network namespaces: {reason}")
    rows = Rows(tokens=32, row_bytes=4096, experts=32, top_k=4)
    case = Case(nodes=2, ranks=2, rows=rows, mbit=50, delay_s=0.002, repeats=5)
    found = measure(case)
    expected = {way: exchange_cost(way, expected_nodes(case, FAST), rows) for way in found}
    for way, measured in found.items():
        assert measured.messages_across == expected[way].messages_across
        assert measured.messages_inside == expected[way].messages_inside
        assert measured.bytes_across == pytest.approx(expected[way].bytes_across, rel=0.05), "rows choose at random"
        assert measured.seconds > 0.7 * expected[way].seconds, "the link lets no more through"
    assert found["hierarchical"].bytes_across < 0.65 * found["flat"].bytes_across
