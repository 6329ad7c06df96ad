"""What is done to the server while it is under load, so that a report can show cause and effect."""
