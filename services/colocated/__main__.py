"""``python -m services.colocated`` runs a colocated worker: see :mod:`services.colocated.role`."""

import sys

from services.colocated.role import main

if __name__ == "__main__":
    sys.exit(main())
