"""The command ``expertmesh-load``, which drives a server and measures what its clients see."""

import sys

from expertmesh.__main__ import PACKAGES


def main() -> int:
    """Runs the command in the process's arguments and returns its exit code."""
    if PACKAGES.is_dir():
        sys.path.insert(0, str(PACKAGES))
    from loadgen.command import main as run

    return run()


if __name__ == "__main__":
    sys.exit(main())
