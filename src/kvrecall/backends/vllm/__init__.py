"""An attention backend of vLLM: `--attention-backend CUSTOM` where kvrecall is installed.

vLLM's pages hold summaries of keys instead of keys and values. The rows lie in host memory, at the same physical block id. So
the life of a block is the life of its rows: prefix caching, preemption, abort and several answers are vLLM's own.

1. `plugin.py`: what vLLM calls when it starts.
2. `settings.py`: what a user sets. `served.py`: what one engine serves, and what is refused. `maps.py`: the statistics of a
   served model's keys.
3. `backend.py`: the classes that vLLM asks for. `window.py`: the recent tokens, a cache group of vLLM's own.
   `window_pages.py`: who has which page of it. `refill.py`: the window of a sequence that begins behind cached blocks.
   `worker.py`, `memory.py`, `capacity.py`: no more blocks than device and host hold. `counts.py`: what steps have fetched;
   `metrics.py`: in vLLM's `/metrics`.
4. `stream.py`: rows in host memory, and how a GPU gets those of a sequence back.
5. On a CPU: `paged.py`, one layer over these blocks; `summaries.py`, what pages hold and how they are searched; `means.py`,
   the means of pages.
6. On a GPU: `plan.py`, what the layers of a pass are told; `device.py`, one layer; `kernels.py`; `finite.py`, whether keys and
   values were finite.
7. `command.py`: how `kvrecall serve` starts vLLM's own server.

`plugin`, `served`, `window`, `window_pages`, `worker` and `backend` import vLLM; the others do not.
"""
