"""An expert worker of a measurement: a server with shared memory, without Redis. ``-m
perf.fabric.exchange.experts``.
"""

from __future__ import annotations

import signal
import sys
import time

import torch

from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.ipc import memory_by
from perf.fabric.exchange.world import SECRET, World, as_it_is, device_of, identity, log_to_stderr
from services.fabric.shared_memory.server import Limits, SharedMemoryServer
from services.fabric.tcp.compute import Compute
from services.fabric.tcp.server import ExpertServer


def serve_seat(
    world: World,
    device: torch.device,
    seat: int,
    group: int,
    memory: str,
    limits: Limits | None = None,
    compute: Compute | None = None,
) -> ExpertServer:
    """A started server of a seat with shared memory; ``compute``: None for what the world says."""
    experts = world.shard_groups()[group].experts
    if compute is None:
        known = {"identity": identity, "pass": as_it_is}
        compute = known.get(world.compute) or world.shard(experts, device).forward
    host = SharedMemoryServer(
        compute,
        memory=memory_by(memory, device),
        device=device,
        layers=list(range(world.layers)),
        num_experts=world.experts,
        hidden=world.hidden,
        dtype=world.torch_dtype,
        limits=limits,
    )
    if device.type == "cuda":
        torch.cuda.synchronize()
    server = ExpertServer(
        lambda layer, *rows: compute(layer, *(part.to(device) for part in rows)),
        experts=experts,
        hello=world.hello(f"w{seat}", seat),
        secret=SECRET,
        extensions=[host],
    )
    server.start()
    return server


def main() -> None:
    parent = Parent()
    log_to_stderr()
    facts, began = parent.facts, time.time()
    server = serve_seat(
        World(**facts["world"]), device_of(facts["gpu"]), facts["seat"], facts["group"], facts["memory"]
    )

    def leave(*_: object) -> None:
        print("leaving:", server.drain(5.0), flush=True)
        sys.exit(0)

    signal.signal(signal.SIGTERM, leave)
    parent.report(port=server.address[1], seat=facts["seat"], group=facts["group"], seconds=time.time() - began)
    for _ in parent.commands():
        pass
    server.close()


if __name__ == "__main__":
    main()
