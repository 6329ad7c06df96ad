"""The console script ``expertmesh``."""
