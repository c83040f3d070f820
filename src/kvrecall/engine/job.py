"""One request inside the loop: its work, piece by piece, and its events for the caller."""

from __future__ import annotations

import threading
import time
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase, TextStreamer

from kvrecall.backends.interrupt import deferred_interrupt
from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.generating import keep_prefix
from kvrecall.engine.decoding import answers
from kvrecall.engine.exact import Drafts, ExactDecoding, kind_of
from kvrecall.engine.generate_args import GenerateArgs
from kvrecall.engine.prefill import read_chunk
from kvrecall.engine.steps import Member, first_block


class Job:
    """A request. The loop's driver does its work; the waiting thread delivers its events and reads its answer. From `prepare`
    to `finish` it is the request that uses the cache (`owner`)."""

    name = "a request in flight"

    def __init__(self, args: GenerateArgs, driven_here: Callable[[], bool]) -> None:
        """driven_here: whether this thread is the loop's driver."""
        self.args, self.here = args, driven_here
        self.cancelled = self.ended = False
        self.error: BaseException | None = None
        self.steps: list[list[int]] = []
        """The answer so far: ids of each step, one per sequence."""
        self.events: deque[Callable[[], None]] = deque()
        """Pending calls of `on_prefill`, `on_token` and `on_text`, in order."""
        self.ready: Any = None
        """On a GPU: work that must come before its first launch."""
        self.member: Member | None = None
        """Its decoding; None until the prompt's last chunk."""
        self._held: int | None = None
        self._ready = 0
        self._begun: Member | None = None
        self.apart = False
        """Whether its prompt is read alone, because a call for several is impossible, or has failed."""
        self.dropped: Any = None
        """Cancels it when nobody holds its `Request` any more (`weakref.finalize`), until it has ended."""
        self._delivering = threading.RLock()
        self._streamer = None
        if args.on_text is not None and args.tokenizer is not None:
            self._streamer = _Streamer(args.tokenizer, args.on_text)
        self._start = self._first = self._end = 0.0
        self._sequences: Tensor | None = None
        self._drafts: Drafts | None = None

    @property
    def decodes(self) -> bool:
        """Whether the prompt is read."""
        return bool(self.steps)

    # Called by the driver.

    def prepare(self) -> None:
        """Before admission: removes tokens from the cache that do not belong to this prompt."""
        if self._held is None:
            args = self.args
            args.cache.owner.hold(self)
            most = args.prompt_tokens - 1
            if args.exact:
                cache, most = args.cache, args.cache.tokens.exact(most)
                missing = most < min(args.prompt_tokens - 1, cache.get_seq_length())
                if missing and cache.fixed_layers() and cache.tokens.known and cache.sequences == args.sequences:
                    cache.reset()  # the prompt is here to be read again
            self._held = keep_prefix(args.cache, args.input_ids, args.attention_mask, most, args.total_tokens)

    def admit(self) -> None:
        """Announces the length to the cache, which may raise HostMemoryError or DeviceMemoryError."""
        args, held = self.args, self._held or 0
        self._start = time.perf_counter()
        args.cache.reserve(args.total_tokens, args.sequences)
        if args.compiled and args.model.device.type == "cuda":
            import_compiler_aside()
        # The call that gives the first token reads the last chunk, which must not be empty.
        self._ready = args.prompt_tokens - min(args.chunk_tokens, args.prompt_tokens - held)
        if self._ready > held:
            self._tell_read(held)

    def read(self) -> Tensor | None:
        """Reads one chunk of the prompt; with the last one, logits `[B, vocabulary]` of the first tokens.

        After KeyboardInterrupt and the like it can be called again, and continues.
        """
        try:
            self.prepare()
            return self._read()
        except BaseException:
            self.begin_again()
            raise

    def begin_again(self) -> None:
        """After an interrupted chunk: the next one goes on behind what the cache holds."""
        self.args.cache.align()
        self._held = self._begun = None

    @property
    def at_end(self) -> bool:
        """Whether the next chunk of its prompt is the last one."""
        return self._held is not None and self._held >= self._ready

    @property
    def missing(self) -> int:
        """Tokens of its prompt that are not read yet."""
        return self.args.prompt_tokens - (self._held or 0)

    def beside(self, first: Job) -> bool:
        """Whether the end of its prompt may be read together with that of another request, whose rows begin alike: neither has
        padding there, nor steps of several tokens."""
        args, block = self.args, first_block(self.args)
        if not self.at_end or self.apart or args.looks_up:
            return False
        padded = args.attention_mask is not None and not bool(args.attention_mask[:, -self.missing :].all())
        alike = block is not None and block == first_block(first.args) and args.autocast == first.args.autocast
        return alike and not padded

    def begin(self) -> Member:
        """Its decoding, which reads the last chunk."""
        if self._begun is None:
            args, mask = self.args, self.args.attention_mask
            args.cache.align()
            mask = torch.ones_like(args.input_ids) if mask is None else mask
            kind = kind_of(args.cache, args.exact, args.looks_up)
            decoding = kind(args.model, args.cache, args.input_ids, mask, args.config, args.seed, args.tokenizer)
            self._begun = Member(args, decoding)
        return self._begun

    def _read(self) -> Tensor | None:
        args, held = self.args, self._held or 0
        if held < self._ready:
            end = min(held + args.chunk_tokens, self._ready)
            with args.computing():
                read_chunk(args.model, args.input_ids, args.cache, slice(held, end), args.attention_mask)
            self._held = end
            self._tell_read(end)
            return None
        logits = self.begin().first()
        self.read_last()
        return logits

    def read_last(self) -> None:
        """The last chunk is read."""
        self.member, self._begun = self._begun, None

    def accept(self, tokens: list[int]) -> bool:
        """Adds the tokens chosen after a call; returns whether the request is complete."""
        assert self.member is not None
        decoding = self.member.decoding
        for step in decoding.taken(tokens):
            decoding.accept(step)
            if not self.steps:
                self._first = time.perf_counter()
                self._tell_read(self.args.prompt_tokens)
            self.steps.append(decoding.steps[-1])
            if self.args.on_token is not None:
                self.events.append(partial(self.args.on_token, len(self.steps)))
            if self._streamer is not None:
                ids = torch.tensor(self.steps[-1], dtype=torch.int64, device="cpu")
                self.events.append(partial(self._streamer.put, ids))
            if decoding.ended:
                break
        with self.args.computing() if decoding.exact else nullcontext():  # it may call the model
            decoding.settle()
        return decoding.ended

    def finish(self, error: BaseException | None) -> None:
        """Releases everything but the answer or the error; afterwards only the user uses the cache."""
        with deferred_interrupt():
            try:
                if self.member is not None:
                    self.member.release()
                    self.member.decoding.close()
            except Exception as failed:
                error = error or failed
            try:
                self.args.cache.align()
            except Exception as failed:
                error = error or failed
            if error is None and self.member is not None:
                decoding = self.member.decoding
                self._sequences = decoding.sequences.clone()
                self._drafts = decoding.drafts if isinstance(decoding, ExactDecoding) else None
                if self._streamer is not None:
                    self.events.append(self._streamer.end)
            else:
                self.events.clear()
                if self.args.made:
                    self.args.cache.reset()
            self._end = time.perf_counter()
            self.member = self._begun = None
            self.error = error and _without_frames(error)
            self.ended = True
            if self.dropped is not None:
                self.dropped.detach()  # which would hold an error, and with it the frames that it has passed
            self.args.cache.owner.release(self)

    def _tell_read(self, tokens: int) -> None:
        if self.args.on_prefill is not None:
            self.events.append(partial(self.args.on_prefill, tokens, self.args.prompt_tokens))

    # Called by the waiting thread.

    def deliver(self) -> None:
        """Makes the pending calls in this thread."""
        if not self.events or not self._delivering.acquire(blocking=False):
            return
        try:
            while self.events:
                self.events.popleft()()
        finally:
            self._delivering.release()

    def result(self) -> GenerateResult:
        """The result of a finished request. Raises its error."""
        if self.error is not None:
            error, self = self.error, None
            try:
                raise error
            finally:
                del error
        args = self.args
        assert self._sequences is not None
        new = answers(self.steps, args.config.eos_token_id)
        texts = None
        if args.tokenizer is not None:
            texts = [str(args.tokenizer.decode(ids, skip_special_tokens=True)) for ids in new]
        seconds = self._first - self._start, self._end - self._first
        return GenerateResult(self._sequences, new, texts, *seconds, args.cache, self._drafts)


def import_compiler_aside() -> threading.Thread:
    """Imports torch's compiler, which takes seconds, while the GPU reads the prompt."""
    thread = threading.Thread(target=import_module, args=("torch._inductor.compile_fx",), daemon=True)
    thread.start()
    return thread


def _without_frames(error: BaseException) -> BaseException:
    """The error without its frames, with a note where it came from. The frames would keep the caches of all requests alive."""
    error.add_note("In the loop of the engine:\n" + "".join(traceback.format_tb(error.__traceback__)).rstrip())
    chain: list[BaseException] = [error]
    for each in chain:
        each.__traceback__ = None
        chain += [other for other in (each.__cause__, each.__context__) if other is not None and other not in chain]
    return error


class _Streamer(TextStreamer):
    """Passes on the text of the answer in whole words."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, on_text: Callable[[str], None]) -> None:
        super().__init__(tokenizer, skip_special_tokens=True)  # type: ignore[arg-type]
        self._on_text = on_text

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._on_text(text)


@dataclass(frozen=True)
class GenerateResult:
    """sequences: prompt and answer, `[B, T]`. new_tokens: the answer's ids per sequence, without padding after the end. cache:
    the given one, or the one made for the given method. drafts: what checks said, of an answer that was checked
    (`exact=True`)."""

    sequences: Tensor
    new_tokens: list[list[int]]
    texts: list[str] | None
    prefill_seconds: float
    decode_seconds: float
    cache: RetrievalCache
    drafts: Drafts | None = None
