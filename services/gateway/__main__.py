"""``python -m services.gateway`` runs a gateway: see :mod:`services.gateway.role`."""

import sys

from services.gateway.role import main

if __name__ == "__main__":
    sys.exit(main())
