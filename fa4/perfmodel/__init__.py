"""Predicted cycles: one execution is recorded, then replayed in a model of one SM."""
