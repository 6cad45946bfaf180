"""One model under several specs, beside FSDP2: what the contestants train, how each does it, and the report."""
