"""An unmodified Hugging Face model trained by Meshfold and by peers, on one GPU."""
