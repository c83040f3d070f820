"""Slots: places of fixed addresses for sequences, and the launches of one decode step that work on all of them."""
