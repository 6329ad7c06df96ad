"""The deployment under attack, those who use it honestly, and those who watch it."""
