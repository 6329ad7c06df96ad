"""`expertmesh trace`: one request of a trace folder in the terminal, or all of it as a file for Perfetto."""
