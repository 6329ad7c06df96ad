"""``python -m services.attention`` runs an attention worker: see :mod:`services.attention.role`."""

import sys

from services.attention.role import main

if __name__ == "__main__":
    sys.exit(main())
