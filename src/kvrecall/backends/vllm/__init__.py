"""An attention backend of vLLM: `--attention-backend CUSTOM` with kvrecall installed.

vLLM's pages hold summaries of keys instead of keys and values. The rows lie in device or host memory under the same physical
block id and live as long as the block. So prefix caching, preemption, abort and several answers are vLLM's own.

1. `plugin.py`: registers the backend when vLLM starts. `checks.py`: what of vLLM's options cannot be served.
   `last_line.py`: why, in the last line of the log.
2. `settings.py`: the user's settings. `engine_state.py`: the state of one engine. `statistics.py`: key statistics of its model.
3. `backend.py`: the classes that vLLM needs. `window.py`: the recent tokens, a cache group of vLLM. `window_pages.py`: the
manager of its pages. `page_sizes.py`: pages beside layers with a sliding window. `refill.py`: restores the window of a sequence
that begins behind cached blocks. `worker.py`, `memory.py`, `capacity.py`: limit the blocks to what device and host hold.
`warmup.py`: the passes before the first prompt. `counts.py`: counters of steps; `metrics.py`: vLLM's `/metrics`.
4. `stream.py`: rows of blocks, and copies to a GPU. 5. On a CPU: `paged.py`, one layer; `summaries.py`, the content
of pages and its search; `means.py`, the means of pages. 6. On a GPU: `plan.py`, the plan of a pass; `device.py`, one layer;
`kernels.py`; `finite.py`, the check for finite keys and values. 7. `command.py`: the command by which `kvrecall serve` starts
vLLM's server; `dry_run.py`: what that start would refuse.

`plugin`, `dry_run`, `engine_state`, `window`, `window_pages`, `worker` and `backend` import vLLM; the others do not.
"""
