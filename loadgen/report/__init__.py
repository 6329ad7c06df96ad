"""Reports of results files: for a browser, a terminal and a build server, and the difference between two runs."""
