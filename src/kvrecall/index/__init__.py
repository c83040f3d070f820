"""Summaries of keys and the search over them; an index owns its memory layout."""
