"""Any course of operations on layers, against plain lists of rows: one machine for every method."""
