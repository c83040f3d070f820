"""Towards an attention backend of vLLM: what does not need vLLM. Nothing here is registered with vLLM yet.

vLLM's pages are to hold summaries of keys instead of keys and values. The rows lie in host memory, at the same physical block
id. So the life of a block is the life of its rows: prefix caching, preemption, abort and several answers are vLLM's own.

1. `settings.py`: what a user sets, and what is refused.
2. `summaries.py`: what pages hold, and how they are searched; the one place that knows which device computes.
3. `paged.py`: one layer over these blocks. It stores, attends to chunks of prompts densely, and retrieves in decode steps.
"""
