"""Requests of several users for one tiny model, asked alone or at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.engine.loop import loop_of
from tests.one_layer import methods

METHODS: dict[str, kvrecall.Method] = {
    name.split("-mean")[0]: method
    for name, method in methods(8).items()
    if name in ("full", *(f"{n}-mean_softmax" for n in ("pariskv", "pariskv-balanced", "exact", "louiskv", "prkv", "ctkvr")))
}
"""The four papers' methods, exact search and full attention, with budgets that do not cover the prompts."""


@dataclass
class User:
    """What one user asks. lengths: tokens of each prompt, padded on the left to the longest."""

    method: kvrecall.Method
    lengths: tuple[int, ...] = (70,)
    new_tokens: int = 12
    seed: int = 0
    more: dict[str, Any] = field(default_factory=dict)

    @property
    def ids(self) -> Tensor:
        """The prompts `[B, T]`."""
        drawn = torch.randint(
            3, 320, (len(self.lengths), max(self.lengths)), generator=torch.Generator().manual_seed(self.seed)
        )
        return drawn * self.mask

    @property
    def mask(self) -> Tensor:
        """`[B, T]`, 0 for padding."""
        longest = max(self.lengths)
        return torch.stack([(torch.arange(longest) >= longest - length).long() for length in self.lengths])

    def arguments(self, cache: kvrecall.RetrievalCache | None, more: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Of `Engine.submit`. Greedy answers of random weights soon repeat, so tokens are drawn."""
        given = {"max_new_tokens": self.new_tokens, "attention_mask": self.mask, "chunk_tokens": 32}
        given |= {"temperature": 1.0, "seed": self.seed, **self.more, **more}
        return (None, self.ids, self.method if cache is None else cache), given

    def submit(self, model: Any, cache: kvrecall.RetrievalCache | None = None, **more: Any) -> engine.Request:
        """The same as a request."""
        args, given = self.arguments(cache, more)
        return engine.Engine.of(model).submit(*args, **given)

    def alone(self, model: Any, cache: kvrecall.RetrievalCache | None = None) -> list[list[int]]:
        """The answer of a model that nobody else uses."""
        args, given = self.arguments(cache, {})
        return engine.generate(model, *args, **given).new_tokens


def in_threads(calls: Sequence[Callable[[], Any]], seconds: float = 120) -> list[Any]:
    """Makes all calls at the same time; what each returned or raised, in order."""
    made: list[Any] = [None] * len(calls)
    gate = threading.Barrier(len(calls))

    def run(number: int) -> None:
        gate.wait(seconds)
        try:
            made[number] = calls[number]()
        except BaseException as error:
            made[number] = error

    threads = [threading.Thread(target=run, args=(number,), daemon=True) for number in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
        assert not thread.is_alive(), "a request hangs"
    return made


@contextmanager
def rows_per_call(model: Any) -> Iterator[list[int]]:
    """How many sequences each decode step of the model has, one number per call."""
    seen: list[int] = []

    def count(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs["input_ids"].shape[1] == 1:
            seen.append(kwargs["input_ids"].shape[0])

    hook = model.register_forward_pre_hook(count, with_kwargs=True)
    try:
        yield seen
    finally:
        hook.remove()


def idle(model: Any) -> bool:
    """Whether the engine holds nothing, and the model is as it was."""
    loop = loop_of(model)
    hooks = [x for x in model.modules() if x._forward_pre_hooks or x._forward_hooks or "_call_impl" in vars(x)]
    return not (loop._active or loop._waiting or loop._driver or hooks) and model.config._attn_implementation == "sdpa"
