"""Servers and runs for tests of the load generator."""
