"""The cost of an exchange among co-located ranks: counts, and the limits of the equations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.errors import ConfigError
from services.placement.planning.exchange_cost import Nodes, Rows, exchange_cost

ROWS = Rows(tokens=256, row_bytes=4096, experts=64, top_k=8)
NODES = Nodes(count=4, ranks=4, across_latency=20e-6, across_bandwidth=1e9, inside_latency=5e-6, inside_bandwidth=400e9)


def cheaper_exchange(nodes: Nodes, rows: Rows) -> str:
    flat, hierarchical = exchange_cost("flat", nodes, rows), exchange_cost("hierarchical", nodes, rows)
    return "hierarchical" if hierarchical.seconds < flat.seconds else "flat"


def test_messages() -> None:
    flat, hierarchical = exchange_cost("flat", NODES, ROWS), exchange_cost("hierarchical", NODES, ROWS)
    assert (flat.messages_across, flat.messages_inside) == (2 * 16 * 12, 2 * 16 * 3)
    assert (hierarchical.messages_across, hierarchical.messages_inside) == (2 * 16 * 3, 2 * 16 * 6)


def test_a_slow_link_that_much_crosses_calls_for_relays() -> None:
    assert cheaper_exchange(NODES, ROWS) == "hierarchical"
    flat, hierarchical = exchange_cost("flat", NODES, ROWS), exchange_cost("hierarchical", NODES, ROWS)
    assert hierarchical.bytes_across < 0.6 * flat.bytes_across
    assert hierarchical.seconds == pytest.approx(3 * 20e-6 + 4 * 5e-6 + hierarchical.bytes_across / 4 / 1e9), (
        "the link is what takes time"
    )


def test_a_fast_link_does_not_pay_for_more_hops() -> None:
    assert cheaper_exchange(replace(NODES, across_bandwidth=1e13), ROWS) == "flat"


def test_messages_that_cost_call_for_relays() -> None:
    few = replace(ROWS, tokens=1)
    assert cheaper_exchange(replace(NODES, across_bandwidth=1e13), few) == "flat"
    assert cheaper_exchange(replace(NODES, across_bandwidth=1e13, message_s=1e-4), few) == "hierarchical"


def test_one_node_has_nothing_to_cross() -> None:
    cost = exchange_cost("hierarchical", replace(NODES, count=1), ROWS)
    assert (cost.messages_across, cost.bytes_across) == (0, 0)
    assert cost.seconds > 0


def test_every_row_goes_everywhere_where_every_expert_is_chosen() -> None:
    everything = replace(ROWS, top_k=64)
    rows = 16 * 256 * 3
    expected = rows * (4096 + 64 * 8) + 8 * 16 * 3 + rows * 4096
    assert exchange_cost("hierarchical", NODES, everything).bytes_across == expected


@pytest.mark.parametrize("changes", [{"count": 0}, {"across_bandwidth": 0.0}, {"inside_latency": -1.0}])
def test_figures_that_cannot_be(changes: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="cannot be"):
        exchange_cost("flat", replace(NODES, **changes), ROWS)  # type: ignore[arg-type]
