"""`expertmesh bench`: measures an engine in this process, or a server, by itself or beside vLLM."""
