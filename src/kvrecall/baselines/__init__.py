"""Baselines: one file per system, with its index and parts if it has any of its own."""
