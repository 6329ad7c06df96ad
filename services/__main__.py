"""``python -m services`` and the console script ``expertmesh``."""

import sys

from services.cli.main import main

__all__ = ["main"]

if __name__ == "__main__":
    sys.exit(main())
