"""An expert worker that holds all experts of the pocket model. ``-m perf.fabric.exchange.pocket_seat``."""

from __future__ import annotations

from perf.fabric.exchange.children import Parent
from perf.fabric.exchange.experts import serve_seat
from perf.fabric.exchange.pocket import pocket_world
from perf.fabric.exchange.world import device_of, log_to_stderr


def main() -> None:
    parent = Parent()
    log_to_stderr()
    facts = parent.facts
    server = serve_seat(pocket_world(facts["rows"]), device_of(facts["gpu"]), facts["seat"], 0, "vmm")
    parent.report(port=server.address[1], seat=facts["seat"], group=0)
    for _ in parent.commands():
        pass
    server.close()


if __name__ == "__main__":
    main()
