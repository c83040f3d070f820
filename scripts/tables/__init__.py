"""The tables of notebook/methods, one module per page."""
