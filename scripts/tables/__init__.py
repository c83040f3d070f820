"""The tables of docs/methods, one module per page."""
