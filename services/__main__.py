"""``python -m services`` runs the command ``expertmesh`` of a clone."""

import sys

from services.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
