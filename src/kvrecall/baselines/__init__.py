"""Baselines: one file per system, or a folder if it has an index or part of its own."""
