"""Measures, checks and tunes :mod:`moe_kernels`. Run with ``kernels/`` on the path: ``python -m bench.run --help``.

``run`` times ops beside their peers, ``verify`` compares every op with its reference, ``tune`` fills the tile table,
``report`` writes docs/kernels.md's tables from ``results.csv``.
"""
