"""A training run: its settings, loop, schedule, memory and checkpoints."""
