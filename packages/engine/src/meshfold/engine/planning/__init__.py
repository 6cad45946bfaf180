"""What a spec holds, moves and waits for, before anything runs."""
