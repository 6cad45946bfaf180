"""A model in chunks: their layout, their states, their gradients, and where they live."""
