"""Runs a program: a model in stages, its micro-batches, and what travels between ranks."""
