"""What every folder may import: structs, errors, and helpers of Triton, numba and files."""
