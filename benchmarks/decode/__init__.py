"""A generated token of a Llama of 8B's shape, beside transformers, gpt-fast's way and LMDeploy."""
