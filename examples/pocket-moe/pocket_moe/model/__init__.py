"""The model: layers, losses, export to Hugging Face's layout."""
