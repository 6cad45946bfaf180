"""Blocks under each tensor-parallel mode, beside DTensor and FSDP2."""
