"""`expertmesh plan --trace`: a day of load replayed through the scaling policy against a model of the server."""
