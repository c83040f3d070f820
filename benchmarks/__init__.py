"""Benchmarks: each refuses to time what fails its check, and compares with the best full attention of the same run."""
