"""Rectangles of a tensor that each rank keeps and writes."""
