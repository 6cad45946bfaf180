"""What happens while the model runs: gathering ahead of use, releasing behind it."""
