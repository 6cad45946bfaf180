"""The memory that chunks live in: budgets, pinned host memory, copies beside the computation."""
