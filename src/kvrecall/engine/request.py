"""Several users of one model: `Engine.of(model).submit(...)` returns a `Request` that can be waited for, streamed and
cancelled."""

from __future__ import annotations

import threading
import weakref
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.families import transformers_model
from kvrecall.core.errors import ParameterError
from kvrecall.core.extras import check_process
from kvrecall.engine.generate_args import check_args
from kvrecall.engine.job import GenerateResult, Job
from kvrecall.engine.loop import Loop, loop_of
from kvrecall.engine.prefill import Progress
from kvrecall.methods.base import Method

_lock = threading.Lock()
_engines: WeakKeyDictionary[nn.Module, Engine] = WeakKeyDictionary()


class Engine:
    """Runs the requests of several threads and tasks on one model, in one loop.

    Nothing needs to be shut down, because the loop has no thread. Threads that wait for a result or a token drive it, so a
    request that nobody waits for advances only while somebody waits for another one.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        """Use `Engine.of`."""
        self._model, self._loop = ref(model), loop_of(transformers_model(model))

    @staticmethod
    def of(model: PreTrainedModel) -> Engine:
        """The engine of a model, or of a wrapper that holds one (PEFT); the same one as long as the model lives.

        Raises ParameterError if it is no model.
        """
        check_process()
        with _lock:
            engine = _engines.get(model) if isinstance(model, nn.Module) else None
            if engine is None:
                engine = _engines[model] = Engine(model)
            return engine

    @property
    def max_sequences(self) -> int:
        """Most sequences in flight, 16 by default; may be set. A request with more sequences runs alone."""
        return self._loop.max_sequences

    @max_sequences.setter
    def max_sequences(self, count: int) -> None:
        if count < 1:
            raise ParameterError("max_sequences", "an integer >= 1", count, "1 runs requests one after another.")
        self._loop.max_sequences = count

    def submit(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        input_ids: Tensor,
        cache: RetrievalCache | Method,
        *,
        max_new_tokens: int,
        chunk_tokens: int | None = None,
        attention_mask: Tensor | None = None,
        on_prefill: Progress | None = None,
        on_text: Callable[[str], None] | None = None,
        on_token: Callable[[int], None] | None = None,
        temperature: float = 0.0,
        top_p: float = 1.0,
        seed: int | None = None,
        eos_token_id: int | list[int] | None = None,
        prompt_lookup_num_tokens: int | None = None,
        capture: bool | None = None,
        compiled: bool = False,
        exact: bool = False,
    ) -> Request:
        """Adds a request with the parameters of `engine.generate`; computes nothing yet.

        Requests are admitted first come, first served. A request waits until prompt and answer fit into memory together with
        the admitted ones, and until there are at most `max_sequences` sequences. Dropping the last reference cancels a request.
        Raises the errors of `engine.generate` for its arguments, and ParameterError for a cache that another request uses.
        """
        model = self._model()
        assert model is not None, "the engine has outlived its model"
        checked = check_args(
            model, tokenizer, input_ids, cache, max_new_tokens=max_new_tokens, chunk_tokens=chunk_tokens,
            attention_mask=attention_mask, on_prefill=on_prefill, on_text=on_text, on_token=on_token, temperature=temperature,
            top_p=top_p, seed=seed, eos_token_id=eos_token_id, prompt_lookup_num_tokens=prompt_lookup_num_tokens,
            capture=capture, compiled=compiled, exact=exact,
        )  # fmt: skip
        checked.cache.owner.check("cache")
        job = Job(checked, self._loop.drives_here)
        request = Request(self._loop, job)
        self._loop.submit(job)
        return request


class Request:
    """One request in flight. Iterating gives, for each step, the new ids of its sequences as a list of B numbers.

    `for` and `result()` are for threads; `async for` and `await` for tasks of asyncio. `on_prefill`, `on_token` and `on_text`
    are called by the thread that waits for the request.
    """

    def __init__(self, loop: Loop, job: Job) -> None:
        self._loop, self._job = loop, job
        job.dropped = weakref.finalize(self, loop.abandon, job)
        job.dropped.atexit = False

    @property
    def done(self) -> bool:
        """Whether it has ended: with a result, an error, or cancelled."""
        return self._job.ended

    def result(self) -> GenerateResult:
        """Waits for the whole answer. Raises the request's error, or RequestCancelledError if it was cancelled.

        An exception in the waiting thread, from a callback or KeyboardInterrupt, cancels the request.
        """
        try:
            self._loop.wait(self._job, self._told)
            return self._job.result()
        finally:
            self = None  # an exception's frame must not keep the cache alive

    def cancel(self) -> None:
        """Cancels the request; does nothing if it has ended.

        Its cache holds the tokens read until then, and may be used again after `result` has raised. A cache that was made for
        the request is freed.
        """
        if not self._job.ended:
            self._loop.cancel(self._job)

    def __iter__(self) -> Iterator[list[int]]:
        seen = 0
        while not self._read(seen):
            self._loop.wait(self._job, partial(self._news, seen))  # also returns after steps that others have driven
            if seen < len(self._job.steps):
                seen += 1
                yield self._job.steps[seen - 1]
        self.result()

    async def __aiter__(self) -> AsyncIterator[list[int]]:
        seen = 0
        while not self._read(seen):
            await self._loop.wait_async(self._job, partial(self._news, seen))
            while seen < len(self._job.steps):
                seen += 1
                yield self._job.steps[seen - 1]
        await self._whole()

    def __await__(self) -> Generator[Any, None, GenerateResult]:
        """As `result`, for a task."""
        return self._whole().__await__()

    async def _whole(self) -> GenerateResult:
        await self._loop.wait_async(self._job, self._told)
        return self._job.result()

    def _told(self) -> bool:
        return self._job.ended and not self._job.events

    def _news(self, seen: int) -> bool:
        return len(self._job.steps) > seen or self._job.ended

    def _read(self, seen: int) -> bool:
        return self._job.ended and seen == len(self._job.steps)


def generate(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase | None,
    input_ids: Tensor,
    cache: RetrievalCache | Method,
    *,
    max_new_tokens: int,
    chunk_tokens: int | None = None,
    attention_mask: Tensor | None = None,
    on_prefill: Progress | None = None,
    on_text: Callable[[str], None] | None = None,
    on_token: Callable[[int], None] | None = None,
    temperature: float = 0.0,
    top_p: float = 1.0,
    seed: int | None = None,
    eos_token_id: int | list[int] | None = None,
    prompt_lookup_num_tokens: int | None = None,
    capture: bool | None = None,
    compiled: bool = False,
    exact: bool = False,
) -> GenerateResult:
    """Answers the whole prompt `[B, T]`. cache: a RetrievalCache, or a method, which gets a new cache. May be called from
    several threads on one model; their requests share decode steps (`Engine`).

    The prompt's first tokens that the cache already holds are not computed again. Tokens of another prompt are removed from the
    cache.

    chunk_tokens: as in `prefill`. temperature: 0 decodes greedily. on_text gets pieces of the answer (one sequence, needs a
    tokenizer); on_token gets the number of answer tokens so far. capture: replay CUDA graphs of steps
    (`backends.transformers.capture`); None: if possible; True: raises CaptureError if not. compiled: compile the model's norms,
    feed-forward layers and rotary embedding by torch.compile, and join projections of the same input, whose weights become
    views of one tensor; both may round differently, and the first time takes some seconds.
    It has no effect on uncaptured steps, such as on a CPU, and is refused with capture=False.

    prompt_lookup_num_tokens: how many tokens to guess from the text (1 to 7) and check in one call, for one prompt; None: the
    model's generation config decides. Greedy answers stay the same, with fewer calls if the text repeats itself. Captured steps
    have all these tokens, guessed or not; they need a method that searches by sphere codes in every step, and no other request
    beside it.

    exact: greedy answers are those of full attention up to rounding, and sampled ones have its distribution: steps of the
    method draft tokens, which a pass over all rows checks (`engine.exact`). `GenerateResult.drafts` says how many were right.
    Refused for rows of eight bits. Tokens of the cache that an earlier answer decoded with searches are read again. Drafts of
    several prompts are accepted as far as those of all are right.

    Other settings of the model's generation config apply (repetition penalty, suppressed tokens, …). Beams, several answers per
    prompt and assisted generation are refused. If prompt and answer exceed the model's context, raises ContextLengthError
    before storing anything.
    """
    request = Engine.of(model).submit(
        tokenizer, input_ids, cache, max_new_tokens=max_new_tokens, chunk_tokens=chunk_tokens, attention_mask=attention_mask,
        on_prefill=on_prefill, on_text=on_text, on_token=on_token, temperature=temperature, top_p=top_p, seed=seed,
        eos_token_id=eos_token_id, prompt_lookup_num_tokens=prompt_lookup_num_tokens, capture=capture, compiled=compiled,
        exact=exact,
    )  # fmt: skip
    try:
        return request.result()
    finally:
        del request  # an exception's frame must not keep the cache alive
