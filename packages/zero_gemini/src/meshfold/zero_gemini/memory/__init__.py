"""Memory of chunks: budgets, pinned host memory, copies in parallel with compute."""
