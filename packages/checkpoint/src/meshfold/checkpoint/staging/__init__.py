"""Copies of tensors in host memory, made beside the training."""
