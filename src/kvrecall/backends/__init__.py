"""Backends: they take queries, keys and values from a framework's model and return its attention."""
