"""Tables and figures of docs/results.md."""
