"""The pocket model: its text, its training, and the evidence of what it can do."""
