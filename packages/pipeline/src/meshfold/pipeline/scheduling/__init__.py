"""Schedules as data: made, checked, simulated, searched, drawn, and turned into programs with communication."""
