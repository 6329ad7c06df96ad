"""A colocated worker: an attention worker and an expert worker in one process, on one device. See ``role``."""
