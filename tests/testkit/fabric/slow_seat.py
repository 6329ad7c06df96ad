"""``python tests/testkit/fabric/slow_seat.py SECONDS OPTIONS...``: an expert worker of which every call takes that
long.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).resolve().parents[2])

from services.experts.role import main  # noqa: E402
from services.model.experts import ExpertShard  # noqa: E402
from testkit.fabric.slow import slow_shards  # noqa: E402


def run(call_s: float, argv: list[str]) -> int:
    slow_shards(ExpertShard, call_s=call_s)
    return main(argv)


if __name__ == "__main__":
    sys.exit(run(float(sys.argv[1]), sys.argv[2:]))
