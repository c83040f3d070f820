"""A whole decode step, retrieval included, as one CUDA graph that never waits for the host.

The host knows zone lengths in advance (one token per step) and writes them to device memory before each replay. Search, trigger
and fetch read device memory only.
"""
