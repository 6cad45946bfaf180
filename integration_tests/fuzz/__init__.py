"""A differential fuzzer: random modules under random specs, each trained beside a plain float64 loop of one process."""
