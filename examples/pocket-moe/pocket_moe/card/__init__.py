"""The model card and its plots, written from what was measured."""
