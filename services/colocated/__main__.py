"""``python -m services.colocated`` runs attention with a seat of its own: see :mod:`services.colocated.role`."""

import sys

from services.colocated.role import main

if __name__ == "__main__":
    sys.exit(main())
