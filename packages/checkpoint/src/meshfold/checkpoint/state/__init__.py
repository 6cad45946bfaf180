"""The small state of a checkpoint, beside its tensors."""
