"""One end of the fabric in a process of its own, of whatever release the path leads to: only what all of them have.

Run as text by :mod:`testkit.last_release`, with what it is to do as JSON. Prints JSON, a line for each thing done, and
ends with its input.
"""

from __future__ import annotations

import inspect
import json
import sys
import time
from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch

import services
from services.model.experts import ExpertWeights
from services.routing import Seat


def part(now: str, before: str) -> Any:
    """The module ``now``, or where it was in the release before."""
    return import_module(now if find_spec("services.fabric.tcp") else before)


rendezvous = part("services.fabric.lockstep.rendezvous", "services.fabric.mesh_join")
fetch = part("services.fabric.nccl.weights", "services.fabric.nccl_weights").fetch
Facts = part("services.fabric.tcp.connect", "services.fabric.tcp_connect").Facts
Timing = part("services.fabric.tcp.peer", "services.fabric.tcp_peer").Timing
memory = part("testkit.fabric.shared_memory", "testkit.symm_fabric")
tcp = part("testkit.fabric.tcp", "testkit.tcp_fabric")
weight_sources = part("services.experts.weight_sources", "services.experts.donors")

GENEROUS = Timing(handshake_s=20.0, alive_s=0.5, silence_s=20.0)
IDS = (0, 2, 5)


def layer() -> dict[int, ExpertWeights]:
    """The same in every process."""
    gate_up, down = (torch.arange(72.0 * n).view(3, -1, width) for n, width in ((2, 4), (1, 6)))
    return {0: ExpertWeights(expert_ids=IDS, w_gate_up_E2FD=gate_up[:, :12], w_down_EDF=down[:, :4])}


def seat(port: int) -> Seat:
    return Seat(number=0, worker="experts-0", group=0, host="127.0.0.1", port=port)


def serve(_: Mapping[str, Any]) -> None:
    """A seat with everything: frames, a lane over gloo, shared memory, weights to give."""
    lanes = tcp.lanes_of("gloo", required=False)
    assert lanes is not None
    server = memory.serve_shared(
        tcp.scaled, lanes=lanes, seat=0, weights=weight_sources.given(layer()), timing=GENEROUS
    )
    say(port=server.address[1])
    for _ in sys.stdin:
        say(calls=server.counts.calls)
    server.close()
    lanes.wait_ended()


def use(given: Mapping[str, Any]) -> None:
    """Rows by each way to the seat on ``port``, and its weights."""
    table = tcp.table_of(seat(given["port"]))
    x_TD = torch.arange(4 * 9.0).view(9, 4)
    with tcp.linked(table, timing=GENEROUS) as link:
        assert torch.equal(tcp.send(link, x_TD, expert=6), 7 * x_TD)
        say(way="frames")
    with tcp.linked(table, lane="gloo", timing=GENEROUS) as link:
        assert torch.equal(tcp.send(link, x_TD, expert=6), 7 * x_TD)
        say(way="lane")
    with memory.linked_shared(table) as shared:
        ids_TK = torch.full((9, 1), 6)
        assert torch.equal(shared.combine(shared.dispatch(0, x_TD, ids_TK, torch.ones(9, 1))), 7 * x_TD)
        say(way="memory", steps=shared.link.shared_steps)
    held = layer()[0]
    tensors = {"gate_up": held.w_gate_up_E2FD, "down": held.w_down_EDF}
    lanes = tcp.lanes_of("gloo")
    assert lanes is not None
    facts = Facts(hello=tcp.hello(), secret=tcp.SECRET, timing=GENEROUS, max_bytes=1 << 20, lanes=lanes)
    shapes = {0: {name: tuple(tensor.shape) for name, tensor in tensors.items()}}
    if "forms" in inspect.signature(fetch).parameters:
        forms = {layer: {name: (shape, torch.float32) for name, shape in of.items()} for layer, of in shapes.items()}
        came = fetch(seat(given["port"]), facts, {0: IDS}, forms)[0]
    else:
        came = fetch(seat(given["port"]), facts, {0: IDS}, shapes, torch.float32)[0]
    assert all(torch.equal(came[name], tensor) for name, tensor in tensors.items())
    say(way="weights")
    lanes.wait_ended()


def hopeless(given: Mapping[str, Any]) -> None:
    """Connects again and again, until it is asked to end."""
    with tcp.linked(tcp.table_of(seat(given["port"])), ready=False) as link:
        (only,) = link._seats.links.values()
        while only.problem is None:
            time.sleep(0.01)
        say(problem=type(only.problem).__name__, message=only.problem.message)


def rank(given: Mapping[str, Any]) -> None:
    """Meets the other rank and adds up with it."""
    facts = rendezvous.Facts(worker="w", node="n", fingerprint="f", package="p", dtype="d", exchange="e")
    meeting = rendezvous.Meeting(
        rank=given["rank"], ranks=2, address="127.0.0.1", port=given["port"], host="127.0.0.1", timeout_s=60,
        secret=tcp.SECRET,
    )  # fmt: skip
    joined = rendezvous.join(meeting, facts)
    group = joined.group()
    sums = torch.tensor([given["rank"] + 1])
    group.allreduce([sums]).wait()
    say(nodes=list(joined.nodes), sum=int(sums))
    sys.stdin.readline()  # the store is rank 0's


def say(**words: object) -> None:
    print(json.dumps(words), flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    todo = json.loads(sys.argv[1])
    say(code=services.__file__)
    {"serve": serve, "use": use, "hopeless": hopeless, "rank": rank}[todo.pop("role")](todo)
