"""The command ``expertmesh``, which ``python -m expertmesh`` runs, too.

A wheel keeps ``services`` and ``moe_kernels`` in a folder of this package, which is on the path of processes that start
here and of no others: in an environment, such names belong to nobody. In a clone they lie beside this package.
"""

import importlib
import sys
from pathlib import Path

PACKAGES = Path(__file__).with_name("_packages")
"""The root of what a wheel brings; the paths below it are those of a clone, but for kernels/moe_kernels."""


def find_packages() -> None:
    """Puts what a wheel brings on the path of this process."""
    if PACKAGES.is_dir() and str(PACKAGES) not in sys.path:
        sys.path.insert(0, str(PACKAGES))


def command(module: str) -> int:
    """Runs the ``main`` of ``module`` on the process's arguments and returns its exit code."""
    find_packages()
    return int(importlib.import_module(module).main())


def main() -> int:
    """Runs ``expertmesh``."""
    return command("services.cli.main")


if __name__ == "__main__":
    sys.exit(main())
