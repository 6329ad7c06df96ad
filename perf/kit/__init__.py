"""What several benchmarks share: processes, loads and stand-ins."""
