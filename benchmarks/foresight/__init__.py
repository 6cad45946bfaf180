"""Plans beside what was measured: a table of configurations, one training of each, and errors of memory and time."""
