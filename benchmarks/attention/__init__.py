"""Attention over split sequences, beside torch's ``context_parallel``."""
