"""Evaluation: tasks, runs and reports; traces of real models and replays of methods over them."""
