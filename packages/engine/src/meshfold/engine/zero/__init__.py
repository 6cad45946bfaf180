"""The entry ``zero`` of the spec: states in chunks, where they live, and the plan behind it."""
