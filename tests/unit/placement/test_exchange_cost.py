"""The cost of an exchange among co-located ranks: counts, and the limits of the equations."""

from __future__ import annotations

from dataclasses import replace

import pytest

from services.errors import ConfigError
from services.placement.planning.exchange_cost import Cost, Nodes, Rows, exchange_cost

ROWS = Rows(tokens=256, row_bytes=4096, experts=64, top_k=8)
NODES = Nodes(count=4, ranks=4, across_latency=20e-6, across_bandwidth=1e9, inside_latency=5e-6, inside_bandwidth=400e9)


def costs(nodes: Nodes, rows: Rows) -> tuple[Cost, Cost]:
    return exchange_cost("flat", nodes, rows), exchange_cost("hierarchical", nodes, rows)


def test_relays_save_messages_and_bytes_on_the_link_that_takes_the_time() -> None:
    flat, hierarchical = costs(NODES, ROWS)
    assert (flat.messages_across, flat.messages_inside) == (2 * 16 * 12, 2 * 16 * 3)
    assert (hierarchical.messages_across, hierarchical.messages_inside) == (2 * 16 * 3, 2 * 16 * 6)
    assert hierarchical.bytes_across < 0.6 * flat.bytes_across
    assert hierarchical.seconds == pytest.approx(3 * 20e-6 + 4 * 5e-6 + hierarchical.bytes_across / 4 / 1e9)


@pytest.mark.parametrize(
    ("nodes", "tokens", "relays"),
    [
        pytest.param({}, 256, True, id="a slow link that much crosses"),
        pytest.param({"across_bandwidth": 1e13}, 256, False, id="a fast link does not pay for more hops"),
        pytest.param({"across_bandwidth": 1e13}, 1, False, id="little crosses"),
        pytest.param({"across_bandwidth": 1e13, "message_s": 1e-4}, 1, True, id="messages that cost"),
    ],
)
def test_relays_pay(nodes: dict[str, float], tokens: int, relays: bool) -> None:
    flat, hierarchical = costs(replace(NODES, **nodes), replace(ROWS, tokens=tokens))  # type: ignore[arg-type]
    assert (hierarchical.seconds < flat.seconds) == relays


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
