"""``python -m services.experts`` runs an expert worker: see :mod:`services.experts.role`."""

import sys

from services.experts.role import main

if __name__ == "__main__":
    sys.exit(main())
