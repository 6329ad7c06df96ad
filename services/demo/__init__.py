"""A small checkpoint made on the spot, and the tour that `make run` gives of a server that serves it."""
