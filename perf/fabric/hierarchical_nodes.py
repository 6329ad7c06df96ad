"""Hierarchical against flat exchange on simulated nodes, and the cost model against both; minutes on a CPU, needs root.

    PYTHONPATH=.:tests .venv/bin/python perf/fabric/hierarchical_nodes.py

Nodes are network namespaces with cables of limited rate and delay. What this machine's processors take for a message
and for a byte is fitted on cables without limit; all other cases are predicted from rate and delay alone.
"""

from __future__ import annotations

import os
from dataclasses import replace

from testkit.processes.simulated_nodes import Case, Measured, expected_nodes, measure

from services.fabric.lockstep.build import Way
from services.placement.planning.exchange_cost import Cost, Nodes, Rows, exchange_cost

MANY, FEW = (Rows(tokens=tokens, row_bytes=4096, experts=32, top_k=4) for tokens in (64, 4))
LINKS = ((100.0, 0.0), (100.0, 0.005), (400.0, 0.02), (1000.0, 0.005))
"""Mbit per second, and seconds of delay in each direction of each node's cable."""


def main() -> None:
    print("nodes      tokens  Mbit/s  delay ms  exchange      messages across/inside  KB across   ms   model ms  error")
    errors = []
    for nodes, ranks in ((2, 2), (4, 4)):
        base = Case(nodes=nodes, ranks=ranks, rows=MANY)
        fit = fitted({rows: measure(replace(base, rows=rows)) for rows in (MANY, FEW)}, base)
        print(f"{nodes} x {ranks}      a message takes {fit.message_s * 1e6:.0f} us of a processor, a MB "
              f"{fit.byte_s * 1e12:.0f} us")  # fmt: skip
        for mbit, delay_s in LINKS:
            for rows in (MANY, FEW):
                case = replace(base, rows=rows, mbit=mbit, delay_s=delay_s)
                for way, found in measure(case).items():
                    errors.append(shown(case, way, found, exchange_cost(way, expected_nodes(case, fit), rows)))
    print(f"mean error of the model {sum(map(abs, errors)) / len(errors):.0%}, worst {max(map(abs, errors)):.0%}")


def fitted(found: dict[Rows, dict[Way, Measured]], case: Case) -> Nodes:
    """``message_s`` and ``byte_s`` with the least sum of squared relative errors, both at least 0."""
    best, least = None, float("inf")
    for message_us in range(0, 1500, 25):
        for byte_ps in range(0, 30000, 500):
            nodes = expected_nodes(case, Nodes(**_plain(case), message_s=message_us / 1e6, byte_s=byte_ps / 1e12))
            error = sum(
                (exchange_cost(way, nodes, rows).seconds / measured.seconds - 1) ** 2
                for rows, ways in found.items()
                for way, measured in ways.items()
            )
            if error < least:
                best, least = nodes, error
    assert best is not None
    return best


def _plain(case: Case) -> dict[str, float | int]:
    fast = {"across_latency": 0.0, "across_bandwidth": 1e12, "inside_latency": 0.0, "inside_bandwidth": 1e12}
    return {"count": case.nodes, "ranks": case.ranks, "ranks_at_once": os.cpu_count() or 1, **fast}


def shown(case: Case, way: Way, found: Measured, cost: Cost) -> float:
    """The relative error of the model."""
    error = cost.seconds / found.seconds - 1
    messages = f"{found.messages_across:.0f}/{found.messages_inside:.0f}"
    print(f"{case.nodes} x {case.ranks}  {case.rows.tokens:10d}  {case.mbit or 0:6.0f}  {case.delay_s * 1e3:8.1f}  "
          f"{way:12s}  {messages:>22s}  {found.bytes_across / 1e3:9.0f}  {found.seconds * 1e3:5.1f}  "
          f"{cost.seconds * 1e3:8.1f}  {error:+5.0%}", flush=True)  # fmt: skip
    return error


if __name__ == "__main__":
    main()
