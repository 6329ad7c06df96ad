"""An attention worker and an expert worker in one process, on one device: see ``role``."""
