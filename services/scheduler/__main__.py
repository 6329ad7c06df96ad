"""``python -m services.scheduler`` runs a scheduler: see :mod:`services.scheduler.role`."""

import sys

from services.scheduler.role import main

if __name__ == "__main__":
    sys.exit(main())
