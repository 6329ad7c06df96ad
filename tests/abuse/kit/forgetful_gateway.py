"""The gateway, but with another time for which an Idempotency-Key is remembered, in seconds, before its options."""

from __future__ import annotations

import sys
from dataclasses import replace

from services.config import QueueSettings
from services.gateway.role import main
from services.queue.limits import QueueLimits


def forget_after(seconds: float) -> None:
    """Takes effect on all limits that are read of settings from now on."""
    usual = QueueLimits.of

    def sooner(_: type[QueueLimits], settings: QueueSettings) -> QueueLimits:
        return replace(usual(settings), idempotency_s=seconds)

    QueueLimits.of = classmethod(sooner)  # type: ignore[assignment]


if __name__ == "__main__":
    forget_after(float(sys.argv[1]))
    sys.exit(main(sys.argv[2:]))
