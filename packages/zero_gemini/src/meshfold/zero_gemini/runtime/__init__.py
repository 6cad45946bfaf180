"""Gathering of chunks ahead of their use, and release after it, while the model runs."""
