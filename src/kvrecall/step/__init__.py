"""The device step: tokens are stored, searched and attended by launches over blocks, run one by one or recorded.

An engine hands over queries, keys, values, block tables and lengths, and gets the output. What is here imports no engine.
`paged.py` is the same step driven by the host, for a CPU.
"""
