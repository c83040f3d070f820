"""An attention backend of vLLM: `--attention-backend CUSTOM` where kvrecall is installed. On CPUs so far.

vLLM's pages hold summaries of keys instead of keys and values. The rows lie in host memory, at the same physical block id. So
the life of a block is the life of its rows: prefix caching, preemption, abort and several answers are vLLM's own.

1. `plugin.py`: what vLLM calls when it starts.
2. `settings.py`: what a user sets. `served.py`: what one engine serves, and what is refused. `maps.py`: the statistics of a
   served model's keys.
3. `backend.py`: the classes that vLLM asks for. `window.py`: the recent tokens, a cache group of vLLM's own.
4. `paged.py`: one layer over these blocks. It stores, attends to chunks of prompts densely, and retrieves in decode steps.
5. `summaries.py`: what pages hold, and how they are searched; the one place that knows which device computes.

`plugin`, `served`, `window` and `backend` import vLLM; the others do not.
"""
