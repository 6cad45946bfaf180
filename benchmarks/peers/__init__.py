"""Other libraries doing the same work."""
