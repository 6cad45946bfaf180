"""Batches: the form a model is called with, what in them counts, and which rank gets which rows."""
