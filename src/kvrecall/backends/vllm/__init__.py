"""An attention backend of vLLM: `--attention-backend CUSTOM` with kvrecall installed.

vLLM's pages hold summaries of keys instead of keys and values. The rows lie in device or host memory under the same physical
block id and live as long as the block. So prefix caching, preemption, abort and several answers are vLLM's own. Layers, their
rows and the plan of a pass are those of `kvrecall.step`.

1. `plugin.py`: registers the backend when vLLM starts. `checks.py`: what of vLLM's options cannot be served. `last_line.py`:
   why, in the last line of the log. `command.py`: the command by which `kvrecall serve` starts vLLM's server; `dry_run.py`:
   what that start would refuse.
2. `backend.py`: the classes that vLLM needs. `engine_state.py`: the state of one engine. `statistics.py`: key statistics of its
   model. `whole.py`: what FlashAttention attends to.
3. `window.py`: the recent tokens, a cache group of vLLM. `window_pages.py`: the manager of its pages. `page_sizes.py`: pages
   beside layers with a sliding window.
4. `worker.py` and `scheduler.py`: vLLM's own, with memory for rows. `refused.py`: host memory that the system refuses later.
   `metrics.py`: counters for vLLM's `/metrics`.

`plugin`, `dry_run`, `engine_state`, `window`, `window_pages`, `worker`, `scheduler`, `whole` and `backend` import vLLM; the
others do not.
"""
