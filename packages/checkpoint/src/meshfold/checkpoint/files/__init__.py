"""Single files: written whole or not at all, and read without running code that they name."""
