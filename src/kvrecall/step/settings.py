"""The user's settings: `--additional-config '{"kvrecall": {"method": "pariskv-balanced", "top_k": 100}}'`."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields
from typing import Any

import torch

from kvrecall.core.errors import CompositionError, ParameterError, UnknownNameError
from kvrecall.core.launch import cdiv
from kvrecall.index.base import IndexConfig
from kvrecall.index.page_means import PageMeans
from kvrecall.methods.base import Method
from kvrecall.methods.registry import get, method_class, names
from kvrecall.methods.settings import current, from_settings
from kvrecall.methods.spec import RECOMMENDED_NAME, parse
from kvrecall.step.memory import bytes_of
from kvrecall.step.stream import STREAMED_TOKENS
from kvrecall.trigger import EveryStep

DEFAULT = "pariskv-balanced"
"""The method of an engine that names none."""

BLOCK_TOKENS = 128
"""Default of tokens per block. Sequences share whole blocks, so a small one is found in more prompts. Blocks of 1,024 tokens
make a step some 3 % faster."""
LEAST_BLOCK = 64
"""Tokens of the smallest block, so that every part of a page is a multiple of the kernels' widest load."""
LOCAL_TOKENS = 1024
"""Default of tokens of the window: most questions and answers fit into it."""

WHOLE_TOKENS = 8192
"""Default of tokens from which on a sequence searches."""

FP8 = ("fp8", "fp8_e4m3")
"""vLLM's names for rows of e4m3 with a scale per layer, 1 unless the checkpoint tells another."""

_CHOSEN_ROWS, _MOST_CHOSEN_ROWS, DENSE_ROWS = 16, 64, 64
"""Rows per program of a step on a GPU: fewest selected rows, doubled while there are more than `_CHOSEN_PARTS` parts, and
beyond `_MOST_CHOSEN_ROWS` only while they are half of all; and other rows."""
_CHOSEN_PARTS, MOST_PARTS = 16, 64
"""Parts of selected rows per sequence and KV head, if larger ones can have few rows; most parts that one program merges."""
_MOST_SELECTED = 4096
"""Most tokens that a search on a GPU selects: its last kernel has them all in registers, and takes minutes to compile for
more."""

_SAME = (
    "dense_layers", "per_layer", "update_interval", "index", "trigger", "static", "prune", "fetch", "attend",
)  # fmt: skip
_REASONS = {
    "update_interval": "every key is summarised when it comes, so no buffer waits",
    "trigger": "a step without a search needs the selection of an earlier one, which a preempted request has lost",
    "static": "its static set follows from a whole prompt",
    "dense_layers": "all layers share one kind of page; dense_layers=[] serves a method that has some",
    "per_layer": "all layers share one kind of page",
}
"""Fields of a method that serving does not support, and the reason."""


def why_unserved(method: Method) -> str:
    """Why no setting of a method with these parts can be served; empty if one can."""
    index = method.index_config()
    if index is None or method.top_k is None:
        return "it attends to everything, as vLLM's own backends do"
    if index.pages_refusal:
        return index.pages_refusal
    parts = {
        "trigger": not isinstance(method.trigger_config(), EveryStep), "static": method.static_config() is not None,
        "prune": method.prune_config() is not None, "attend": method.attends_on_host, "dense_layers": bool(method.dense_layers),
    }  # fmt: skip
    return next((_REASONS.get(part, f"{part} is not served yet") for part, has in parts.items() if has), "")


def served() -> list[str]:
    """Names of the methods that can be served, registered ones too: their summary of a key depends on the key and its position
    alone, so that requests can share blocks."""
    found = []
    for name in names():
        with suppress(Exception):  # somebody's registration that cannot be imported must not hide another refusal
            if not why_unserved(get(name)):
                found.append(name)
    return found


def _served() -> str:
    return f"Served are {', '.join(served())}."


def least_block(method: Method) -> int:
    """Tokens of the smallest block whose page can hold summaries and means of a method that is served."""
    index, means = method.index_config(), method.estimate_config()
    assert index is not None
    return max(LEAST_BLOCK, index.paged_tokens, 1 if means is None else means.page_tokens)


def whole_below(method: Method) -> int:
    """Sequences shorter than this attend to all their tokens, in device memory; all of them are sinks or recent at least."""
    return max(method.full_attention_threshold, method.sink_tokens + method.local_tokens + 1)


def check_block_size(tokens: int, least: int = LEAST_BLOCK) -> None:
    """Raises ParameterError for an unsupported block size."""
    if not least <= tokens <= STREAMED_TOKENS or tokens.bit_count() != 1:
        wanted = f"a power of two from {least} to {STREAMED_TOKENS}"
        raise ParameterError("block_size", wanted, tokens, f"Give --block-size {max(least, BLOCK_TOKENS)}.")


def row_dtype_of(cache_dtype: str) -> torch.dtype | None:
    """In which rows are stored, if not in the model's dtype. cache_dtype: vLLM's name of it."""
    return torch.float8_e4m3fn if cache_dtype in FP8 else None


def spelled(method: str) -> dict[str, Any]:
    """A method as text (`methods.spec`) as keys of the configuration: name, settings, budget. Raises ParameterError."""
    # What is recommended there has no update_interval: every key is summarised when it comes.
    spec = parse(DEFAULT if method == RECOMMENDED_NAME else method)
    if spec.is_file:
        raise ParameterError("method", "a name and settings under vLLM, no file", method, _served())
    return {"method": spec.name, **spec.settings, **({} if spec.budget is None else {"top_k": spec.budget})}


@dataclass(frozen=True)
class Settings:
    """The settings of an engine. host_memory: bytes for rows of all ranks of a machine; None: a share of the free memory; 0:
    all rows lie in device memory."""

    method: Method
    host_memory: int | None = None

    @staticmethod
    def of(additional_config: object) -> Settings:
        """From vLLM's `additional_config`. Raises errors of `kvrecall.core.errors` that name what is wrong."""
        given = additional_config.get("kvrecall", {}) if isinstance(additional_config, Mapping) else {}
        if not isinstance(given, Mapping):
            raise ParameterError("additional_config['kvrecall']", "an object", given, 'For example {"top_k": 100}.')
        params: dict[str, Any] = current(given)
        name, memory = params.pop("method", DEFAULT), params.pop("host_memory", None)
        if "residency" in params:
            why = "rows lie on the device as far as it has room beside the summaries of rows on the host"
            raise CompositionError("vLLM with residency", why, 'Leave it out; with "host_memory": 0 all of them do.')
        if not isinstance(name, str):
            raise ParameterError("method", "a method as text", name, _served())
        parsed = spelled(name)
        name = parsed.pop("method")
        if twice := sorted(parsed.keys() & params.keys()):
            raise ParameterError("method", f"{twice[0]} once", given["method"], "Give it in the text or as a key beside it.")
        params |= parsed
        chosen = method_class(name)
        known = [f.name for f in fields(chosen) if f.name not in _SAME]
        for key, value in params.items():
            if key == "dense_layers" and not value:
                continue
            if key in _SAME:
                why = _REASONS.get(key, "it is not served yet")
                raise CompositionError(f"vLLM with {key}={value!r}", why, "Leave it out.")
            if key not in known:
                raise UnknownNameError(f"setting of {name}", key, [*known, "method", "host_memory"])
        estimate = {"estimate": PageMeans.name} if name == DEFAULT else {}
        defaults = {"local_tokens": LOCAL_TOKENS, "full_attention_threshold": WHOLE_TOKENS}
        method = from_settings(name, {**defaults, **estimate, **params})
        index = method.index_config()
        if why := why_unserved(method) or (index.why_unpaged() if index is not None else ""):
            raise CompositionError(f"vLLM with method={name}", why, _served())
        if method.local_tokens < 1:
            raise ParameterError("local_tokens", "an integer > 0", method.local_tokens, "Every token attends to itself.")
        if index is not None and not index.paged_tokens <= min(method.local_tokens, BLOCK_TOKENS):
            wanted = f"at most {min(method.local_tokens, BLOCK_TOKENS)}, which the window and a block hold"
            raise ParameterError("page_tokens", wanted, index.paged_tokens, "Take fewer, or more local_tokens.")
        means = method.estimate_config()
        if means is not None and (means.page_tokens.bit_count() != 1 or means.page_tokens > BLOCK_TOKENS):
            wanted = f"a power of two, at most {BLOCK_TOKENS}: pages lie in blocks"
            raise ParameterError("page_tokens", wanted, means.page_tokens, 'Use "estimate": "page-means", which has 64.')
        return Settings(method, None if memory is None else bytes_of(memory, least=0))

    def check_gpu(self) -> None:
        """Raises errors of `kvrecall.core.errors` for settings without a kernel."""
        index, method = self.index, self.method
        if why := index.why_unpaged_on_gpu():
            raise CompositionError(f"vLLM on a GPU with method={method.name}", why, f"Serve {DEFAULT}.")
        if method.top_k is not None and method.top_k > _MOST_SELECTED:
            expected = f"at most {_MOST_SELECTED} on a GPU"
            raise ParameterError("top_k", expected, method.top_k, "Take fewer, and more local_tokens.")
        Parts.of(method)

    def check_drafts(self, drafts: int) -> None:
        """Raises ParameterError if drafts have so many tokens that the window does not hold them: a draft's last token searches
        no page that the same pass completes."""
        least = drafts + self.index.paged_tokens
        if least > self.method.local_tokens:
            expected = f"at least {least}, for a draft of {drafts} tokens, which are attended in full"
            raise ParameterError("local_tokens", expected, self.method.local_tokens, "Take more.")

    def check_block_size(self, tokens: int) -> None:
        """Raises ParameterError for an unsupported block size of vLLM."""
        check_block_size(tokens, least_block(self.method))

    @property
    def index(self) -> IndexConfig:
        """The index of the method."""
        index = self.method.index_config()
        assert index is not None
        return index


@dataclass(frozen=True)
class Parts:
    """Parts of the attention of a sequence and KV head on a GPU, each a program's: `chosen` of `rows` selected rows each, then
    `sinks` and `window` of `DENSE_ROWS`."""

    rows: int
    chosen: int
    sinks: int
    window: int

    @staticmethod
    def of(method: Method) -> Parts:
        """Raises ParameterError for more than one program merges, with at least one for an estimate."""
        assert method.top_k is not None
        rows = _CHOSEN_ROWS
        while cdiv(method.top_k, rows) > (_CHOSEN_PARTS if rows < _MOST_CHOSEN_ROWS else MOST_PARTS // 2):
            rows *= 2
        chosen, sinks = cdiv(method.top_k, rows), cdiv(method.sink_tokens, DENSE_ROWS)
        window, room = (
            cdiv(method.local_tokens, DENSE_ROWS),
            MOST_PARTS - chosen - sinks - (method.estimate_config() is not None),
        )
        if window > room:
            expected = f"at most {room * DENSE_ROWS} with this top_k and these sinks"
            raise ParameterError("local_tokens", expected, method.local_tokens, "Take fewer.")
        return Parts(rows, chosen, sinks, window)

    @property
    def total(self) -> int:
        """All of them."""
        return self.chosen + self.sinks + self.window
