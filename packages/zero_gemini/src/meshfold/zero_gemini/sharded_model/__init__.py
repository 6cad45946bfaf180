"""A model held in chunks: building it, moving it between memories, reducing gradients, reading and writing values."""
