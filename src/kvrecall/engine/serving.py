"""One model's answers to the requests of OpenAI's API, over `engine.Engine`.

1. A request is checked and tokenised before anything is computed; what is not supported is refused with the reason.
2. Its longest known beginning comes from a fork of a saved session, or of a prompt that was read before.
3. The rest of a long prompt is read and kept for later requests, before anything is decoded: what a cache concludes from an
   answer never reaches another request.
4. A fork decodes the answer, together with the other requests. It ends when the client leaves.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.families import context_limit
from kvrecall.backends.transformers.generating import shared_tokens
from kvrecall.backends.transformers.token_log import first_true
from kvrecall.core.errors import ContextLengthError, ParameterError, RequestCancelledError, UnknownNameError
from kvrecall.engine.decoding import generation_config
from kvrecall.engine.document import Document
from kvrecall.engine.openai_requests import Asking, ChatRequest, CompletionRequest
from kvrecall.engine.prompts import marked_prompt, messages_prompt
from kvrecall.engine.request import Engine, Request
from kvrecall.methods.base import Method

T = TypeVar("T")


class Service:
    """Answers of one model. One thread at a time tokenises and forks; the engine's loop computes."""

    def __init__(
        self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, name: str, method: Method, *, prefix_bytes: int,
        context: int | None = None, host_rows: Literal["plain", "fp8"] = "plain",
        sessions: Mapping[str, Document] | None = None,
    ) -> None:  # fmt: skip
        """name: the model's for clients. prefix_bytes: host memory for prompts that were read. context: tokens of prompt and
        answer at most; at most, and by default, the model's own limit. sessions: saved documents, by names that clients give as
        the model's.

        Raises ParameterError if the model's generation config asks for what is not supported.
        """
        self.model, self.tokenizer, self.name, self.method = model, tokenizer, name, method
        self.host_rows: Literal["plain", "fp8"] = host_rows
        self.sessions = dict(sessions or {})
        self.limit = min((tokens for tokens in (context, context_limit(model.config)) if tokens), default=None)
        ends = generation_config(model, tokenizer, 1, 0.0, 1.0, None).eos_token_id
        self.ends: list[int] = ends if isinstance(ends, list) else [] if ends is None else [ends]
        embeddings: Any = model.get_input_embeddings()
        self._vocabulary: int = embeddings.weight.shape[0]
        self.prefixes = PrefixStore(prefix_bytes, [document.cache for document in self.sessions.values()])
        self.created, self.closing = int(time.time()), False
        self.requests = WeakSet[Request]()
        self._reading: list[tuple[Tensor, asyncio.Future[None]]] = []
        """Prompts that are read now, and what to wait for."""
        self._worker = ThreadPoolExecutor(1, "kvrecall-serve")

    async def start(self, body: Asking) -> Answering:
        """Reads the prompt and computes the first token. Raises what refuses the request."""
        ids, tokens = await self._aside(lambda: self._prompt(body))
        try:
            return await self._start(body, ids, tokens)
        except (MemoryError, torch.OutOfMemoryError):
            if not await self._aside(self.prefixes.clear):
                raise
        return await self._start(body, ids, tokens)

    def close(self) -> None:
        """Cancels all requests, and refuses new ones."""
        self.closing = True
        for request in list(self.requests):
            request.cancel()

    def _prompt(self, body: Asking) -> tuple[Tensor, int]:
        """(ids `[1, T]` of the prompt, tokens of the answer at most). Raises ParameterError, UnknownNameError or
        ContextLengthError."""
        document = self.sessions.get(body.model)
        if document is None and body.model != self.name:
            raise UnknownNameError("model", body.model, [self.name, *self.sessions])
        if isinstance(body, CompletionRequest):
            if document is not None:
                raise ParameterError("model", repr(self.name), body.model, "A session answers /v1/chat/completions.")
            ids = body.prompt if isinstance(body.prompt, list) else marked_prompt(self.tokenizer, body.prompt)
        else:
            assert isinstance(body, ChatRequest)
            messages = [(message.role, message.content) for message in body.messages]
            ids = self._behind(document, messages) if document else messages_prompt(self.tokenizer, messages)
        known = self._vocabulary
        if strange := [token for token in ids if not 0 <= token < known]:
            raise ParameterError("prompt", f"token ids from 0 to {known - 1:,}", strange[0], "Use this model's tokenizer.")
        tokens = body.answer_tokens or body.usual_tokens
        if self.limit is not None:
            if len(ids) >= self.limit:
                raise ContextLengthError("prompt", self.limit - 1, len(ids))
            tokens = body.answer_tokens or min(tokens, self.limit - len(ids))
            if len(ids) + tokens > self.limit:
                raise ContextLengthError("prompt and answer", self.limit, len(ids) + tokens)
        return torch.tensor([ids], dtype=torch.int64, device="cpu"), tokens

    def _behind(self, document: Document, messages: list[tuple[str, str]]) -> list[int]:
        roles = [role for role, _ in messages]
        if roles != ["user", "assistant"] * (len(roles) // 2) + ["user"]:
            remedy = "The session holds what comes before the first question."
            raise ParameterError("messages", "the user's and the assistant's in turn for a session", roles, remedy)
        return document.prompt.conversation([text for _, text in messages])

    async def _start(self, body: Asking, ids: Tensor, tokens: int) -> Answering:
        cache, known = await self._known(ids, ids.shape[1] + tokens)
        if cache is None:
            cache = RetrievalCache(self.model.config, self.method, host_rows=self.host_rows)
            cache.tokenizer = self.tokenizer
        if ids.shape[1] - known >= LEAST_TOKENS:
            done = asyncio.get_running_loop().create_future()
            self._reading.append((ids, done))
            try:
                cache = await self._read(ids, cache)
            finally:
                self._reading = [each for each in self._reading if each[1] is not done]
                done.set_result(None)
        top_p = 1.0 if body.top_p is None else body.top_p
        request = self._submit(ids, cache, tokens, temperature=body.temperature or 0.0, top_p=top_p, seed=body.seed)
        answering = Answering(self, body, request, ids.shape[1], known, tokens)
        await answering.begin()
        return answering

    async def _known(self, ids: Tensor, final_tokens: int) -> tuple[RetrievalCache | None, int]:
        """As `PrefixStore.fork`, after prompts have been read that have much more in common with this one."""
        while True:
            cache, known = await self._aside(lambda: self.prefixes.fork(ids, final_tokens))
            longer = [done for other, done in self._reading if _common(other, ids) >= known + LEAST_TOKENS]
            if not longer:
                return cache, known
            await asyncio.wait(longer, return_when=asyncio.FIRST_COMPLETED)

    async def _read(self, ids: Tensor, cache: RetrievalCache) -> RetrievalCache:
        """Reads a prompt but for two tokens, which the request itself reads, and keeps it; returns a fork."""
        await self._submit(ids[:, :-2], cache, 1)  # the first token is not fed

        def kept() -> RetrievalCache:
            self.prefixes.keep(cache)
            return cache.fork()

        return await self._aside(kept)

    def _submit(self, ids: Tensor, cache: RetrievalCache, tokens: int, **sampling: Any) -> Request:
        if self.closing:
            raise RequestCancelledError
        request = Engine.of(self.model).submit(None, ids.to(self.model.device), cache, max_new_tokens=tokens, **sampling)
        self.requests.add(request)
        return request

    async def _aside(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._worker, work)


class Answering:
    """A request whose answer is decoded."""

    def __init__(
        self, service: Service, body: Asking, request: Request, prompt_tokens: int, cached_tokens: int, most: int
    ) -> None:
        """most: tokens of the answer at most."""
        self._service, self._body, self._request, self._most = service, body, request, most
        self._prompt_tokens, self._cached_tokens, self._tokens = prompt_tokens, cached_tokens, 0
        self._steps = aiter(request)
        self._first: list[int] | None = None
        self.reason: Literal["stop", "length"] = "length"
        """Why the answer has ended."""

    async def begin(self) -> None:
        """Computes the first token."""
        self._first = await anext(self._steps)

    async def texts(self) -> AsyncIterator[str]:
        """Pieces of the answer's text, which ends before the first stop string."""
        decoder, stops, held = _TextDecoder(self._service.tokenizer), self._body.stops, ""
        try:
            async for token in self._ids():
                self._tokens += 1
                ended = token in self._service.ends
                self.reason = "stop" if ended else "length"
                held += decoder.add(token, last=ended or self._tokens == self._most)
                places = [place for stop in stops if (place := held.find(stop)) >= 0]
                if places:
                    self.reason = "stop"
                    yield held[: min(places)]
                    return
                ready = len(held) - _begun(held, stops)
                yield held[:ready]
                held = held[ready:]
            yield held
        finally:
            self._request.cancel()

    async def _ids(self) -> AsyncIterator[int]:
        assert self._first is not None
        yield self._first[0]
        async for (token,) in self._steps:
            yield token

    def usage(self) -> dict[str, Any]:
        """The counts of tokens until now."""
        return {
            "prompt_tokens": self._prompt_tokens, "completion_tokens": self._tokens,
            "total_tokens": self._prompt_tokens + self._tokens,
            "prompt_tokens_details": {"cached_tokens": self._cached_tokens},
        }  # fmt: skip


class _TextDecoder:
    """Token ids to text, piece by piece. A piece is decoded behind the last one with a text, which decides about blanks."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer, self._ids, self._before, self._read = tokenizer, list[int](), 0, 0

    def add(self, token: int, last: bool) -> str:
        """The text that a token completes; characters may take several tokens. last: no token follows."""
        self._ids.append(token)
        text = self._decoded(len(self._ids))
        if text.endswith("\ufffd") and not last:
            return ""
        new = text[len(self._decoded(self._read)) :]
        if new:
            self._before, self._read = self._read, len(self._ids)
        return new

    def _decoded(self, end: int) -> str:
        return str(self._tokenizer.decode(self._ids[self._before : end], skip_special_tokens=True))


def _common(a: Tensor, b: Tensor) -> int:
    """How many first ids `[1, ·]` are the same."""
    width = min(a.shape[1], b.shape[1])
    return first_true(a[0, :width] != b[0, :width])


def _begun(text: str, stops: list[str]) -> int:
    """How many last characters may be the beginning of a stop string."""
    most = max(map(len, stops), default=1) - 1
    return next((n for n in range(min(most, len(text)), 0, -1) if any(stop.startswith(text[-n:]) for stop in stops)), 0)


LEAST_TOKENS = 256
"""Fewer tokens are read again rather than kept or forked."""


class PrefixStore:
    """Caches with one sequence that have read a prompt and decoded nothing. The least recently used one leaves first.

    Requests get forks. One thread at a time may use it.
    """

    def __init__(self, limit_bytes: int, sessions: Sequence[RetrievalCache] = ()) -> None:
        """limit_bytes: host memory that the kept caches may take. sessions: caches that stay, and do not count."""
        self.limit_bytes, self._sessions = limit_bytes, list(sessions)
        self._kept: list[RetrievalCache] = []
        """The least recently used one first."""

    def fork(self, ids: Tensor, final_tokens: int) -> tuple[RetrievalCache | None, int]:
        """(a cache with the longest known beginning of the prompt `[1, T]`, its tokens), or (None, 0). final_tokens: of prompt
        and answer."""
        found = [(shared_tokens(each, ids, final_tokens), each) for each in self._kept]
        found += [(shared_tokens(each, ids, final_tokens, whole=True), each) for each in self._sessions]
        for tokens, cache in sorted(found, key=lambda each: each[0], reverse=True):
            if tokens < LEAST_TOKENS:
                break
            fork = cache.fork()
            fork.crop(tokens - fork.get_seq_length())
            if cache in self._kept:
                self._kept.remove(cache)
                self._kept.append(cache)
            return fork, tokens
        return None, 0

    def keep(self, cache: RetrievalCache) -> None:
        """Keeps a cache in place of those whose tokens it begins with."""
        ids = cache.tokens.ids()
        if ids is None:
            return
        self._kept = [each for each in self._kept if each.tokens.common_prefix(ids) < each.get_seq_length()] + [cache]
        while self._kept and self.nbytes > self.limit_bytes:
            del self._kept[0]

    def clear(self) -> bool:
        """Drops all that is kept; returns whether there was any."""
        some = bool(self._kept)
        self._kept.clear()
        return some

    @property
    def nbytes(self) -> int:
        """Host bytes of the kept caches: blocks that several share, or share with a session, count once, or not at all."""
        filled: dict[tuple[int, int], int] = {}  # tokens in each block
        for cache in [*self._kept, *self._sessions]:
            for table in cache.tables or []:
                size, held = table.pool.block_size, max(table.lengths.values(), default=0)
                for place, block in enumerate(table.blocks):
                    tokens = 0 if cache in self._sessions else max(0, min(size, held - place * size))
                    key = id(table.pool), block
                    filled[key] = tokens and max(tokens, filled.get(key, 0))
        windows = [layer.state.store.resident.nbytes for each in self._kept for layer in each.retrieval_layers if layer.state]
        rows = self._kept[0].host_bytes(sum(filled.values())) if self._kept else 0
        return rows + sum(windows)
