"""A model in chunks: layout, states, gradients and placement."""
