"""Files that were damaged or made by somebody else: seeded damage of every kind, and what reading them comes to."""
