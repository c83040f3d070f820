"""A whole decode step as one CUDA graph, retrieval inside: nothing on the host is asked while it runs.

The host knows every zone length in advance (one token per step), so it writes them into device memory before each replay; the
search itself, the trigger and the fetch depend on nothing but device memory.
"""
