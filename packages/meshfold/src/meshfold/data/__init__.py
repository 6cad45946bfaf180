"""Text to rows of token ids: files, folders, datasets, tokenizers."""
