"""Checkpoints: what a rank keeps of every tensor, written now or beside the training, and read under any other spec."""
