"""Tables and figures of notebook/results.md."""
