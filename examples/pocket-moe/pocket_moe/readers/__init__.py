"""What turns packages of texts into plain text, and what texts there are."""
