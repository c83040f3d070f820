"""Benchmarks: each refuses to time what fails its correctness check, and compares with the best full attention of the same run."""
