"""The command ``expertmesh-load``, which drives a server and measures what its clients see."""

import sys

from expertmesh.__main__ import command


def main() -> int:
    """Runs ``expertmesh-load``."""
    return command("loadgen.command")


if __name__ == "__main__":
    sys.exit(main())
