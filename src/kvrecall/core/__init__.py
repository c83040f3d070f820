"""Structs, errors, and helpers for Triton, numba and files. Every folder may import it."""
