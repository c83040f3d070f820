"""The arguments of one request, checked before anything is stored."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.integrations.fsdp import is_fsdp_managed_module

from kvrecall.backends.transformers import RetrievalCache
from kvrecall.backends.transformers.families import context_limit, transformers_model
from kvrecall.backends.transformers.forward_pass import check_padding
from kvrecall.core.errors import CaptureError, ContextLengthError, ParameterError
from kvrecall.core.texts import check_seed, integer
from kvrecall.engine.decoding import check_guessed, generation_config
from kvrecall.engine.exact import check_exact
from kvrecall.engine.lookup import check_lookup
from kvrecall.engine.prefill import Progress, check_prompt, chunk_size
from kvrecall.methods.base import Method


@dataclass(frozen=True, eq=False)
class GenerateArgs:
    """The arguments of `engine.generate`. cache: the given one, or a new one for the method (`made`).

    autocast: whether the caller's thread uses torch.autocast on the model's device, and its dtype.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase | None
    input_ids: Tensor
    cache: RetrievalCache
    made: bool
    config: GenerationConfig
    max_new_tokens: int
    chunk_tokens: int
    attention_mask: Tensor | None
    on_prefill: Progress | None
    on_text: Callable[[str], None] | None
    on_token: Callable[[int], None] | None
    seed: int | None
    capture: bool | None
    compiled: bool
    exact: bool
    autocast: tuple[bool, torch.dtype]

    @property
    def prompt_tokens(self) -> int:
        """Tokens per sequence of the prompt, padding included."""
        return self.input_ids.shape[1]

    @property
    def sequences(self) -> int:
        """B, the number of prompts."""
        return self.input_ids.shape[0]

    @property
    def total_tokens(self) -> int:
        """Tokens per sequence of prompt and answer."""
        return self.prompt_tokens + self.max_new_tokens

    @property
    def looks_up(self) -> bool:
        """Whether it uses prompt look-up."""
        return self.config.prompt_lookup_num_tokens is not None

    @property
    def shares_steps(self) -> bool:
        """Whether its captured steps can be those of other requests, too. Prompt look-up has steps of its own width."""
        return self.capture is not False and not self.looks_up

    def computing(self) -> AbstractContextManager[Any]:
        """The autocast context of the caller's thread."""
        enabled, dtype = self.autocast
        return torch.autocast(self.model.device.type, dtype=dtype, enabled=enabled)


def check_args(
    model: Any, tokenizer: PreTrainedTokenizerBase | None, input_ids: Tensor, cache: RetrievalCache | Method, *,
    max_new_tokens: int, chunk_tokens: int | None, attention_mask: Tensor | None, on_prefill: Progress | None,
    on_text: Callable[[str], None] | None, on_token: Callable[[int], None] | None, temperature: float, top_p: float,
    seed: int | None, eos_token_id: int | list[int] | None, prompt_lookup_num_tokens: int | None, capture: bool | None,
    compiled: bool, exact: bool = False,
) -> GenerateArgs:  # fmt: skip
    """Checks the arguments of `engine.generate`. Raises ParameterError, ShapeError, ContextLengthError or CaptureError."""
    if not isinstance(cache, RetrievalCache | Method):
        remedy = "For example kvrecall.methods.recommended(), or kvrecall.methods.get(name)."
        raise ParameterError("cache", "a RetrievalCache or a kvrecall method", type(cache).__name__, remedy)
    check_tokenizer(tokenizer)
    check_prompt(model, input_ids, chunk_tokens, attention_mask)
    chunk_tokens = chunk_size(model, chunk_tokens, input_ids.shape[0])
    if attention_mask is not None:
        check_padding(attention_mask, whole=True)
    check_sampling(max_new_tokens, temperature, top_p, seed)
    for name, call in {"on_prefill": on_prefill, "on_text": on_text, "on_token": on_token}.items():
        if call is not None and not callable(call):
            raise ParameterError(name, "a function", call, "It is called as the answer is made; leave it out for none.")
    for each in eos_token_id if isinstance(eos_token_id, list) else [] if eos_token_id is None else [eos_token_id]:
        integer("eos_token_id", each, "Give the tokenizer's id of the token that ends an answer, or a list of them.", least=0)
    limit = context_limit(model.config)
    if limit and input_ids.shape[1] + max_new_tokens > limit:
        raise ContextLengthError("prompt and answer", limit, input_ids.shape[1] + max_new_tokens)
    made, inner = isinstance(cache, Method), transformers_model(model)
    if isinstance(cache, Method):
        cache = RetrievalCache(model.config, cache)
    cache.tokenizer = tokenizer if cache.tokenizer is None else cache.tokenizer
    cache.meet(inner)
    if compiled and capture is False:
        raise ParameterError("compiled", "False with capture=False", compiled, "Only captured steps run compiled modules.")
    if on_text is not None and (tokenizer is None or input_ids.shape[0] != 1):
        got = f"{input_ids.shape[0]} sequences" if tokenizer is not None else "no tokenizer"
        raise ParameterError("on_text", "one sequence and a tokenizer", got, "Use on_token, or generate one by one.")
    if capture and model.device.type != "cuda":
        raise CaptureError(f"the model is on {model.device}", "Move it to a CUDA device, or leave `capture` out.")
    _check_shards(model)
    config = generation_config(model, tokenizer, max_new_tokens, temperature, top_p, eos_token_id, prompt_lookup_num_tokens)
    if config.prompt_lookup_num_tokens is not None:
        check_lookup(config.prompt_lookup_num_tokens, input_ids.shape[0], cache)
        check_guessed(inner, "prompt_lookup_num_tokens")
    if exact:
        check_exact(cache)
        check_guessed(inner, "exact")
    device = model.device.type
    return GenerateArgs(
        model, tokenizer, input_ids, cache, made, config, max_new_tokens, chunk_tokens, attention_mask, on_prefill, on_text,
        on_token, seed, capture, compiled, bool(exact), (torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)),
    )  # fmt: skip


def check_sampling(max_new_tokens: int, temperature: float, top_p: float, seed: int | None = None) -> None:
    """Raises ParameterError for impossible settings of an answer."""
    if not isinstance(max_new_tokens, Integral) or isinstance(max_new_tokens, bool) or max_new_tokens < 1:
        raise ParameterError("max_new_tokens", "an integer >= 1", max_new_tokens, "Ask for at least one token.")
    if not isinstance(temperature, Real) or not 0 <= temperature < float("inf"):  # also refuses NaN
        raise ParameterError("temperature", "a finite number >= 0", temperature, "0 decodes greedily.")
    if not isinstance(top_p, Real) or not 0 < top_p <= 1:
        raise ParameterError("top_p", "a number in (0, 1]", top_p, "1 samples from all tokens.")
    check_seed("seed", seed)


def check_tokenizer(tokenizer: object, needed: bool = False) -> None:
    """Raises ParameterError if it is no tokenizer. needed: whether None is refused."""
    if not (tokenizer is None and not needed) and not hasattr(tokenizer, "decode"):
        remedy = "Pass transformers' AutoTokenizer.from_pretrained(…) of the model; the model comes first."
        raise ParameterError("tokenizer", "the model's tokenizer", type(tokenizer).__name__, remedy)


def _check_shards(model: Any) -> None:
    """Raises ParameterError for models that all processes must call equally often (FSDP, ZeRO-3)."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_world_size() > 1 and (is_deepspeed_zero3_enabled() or is_fsdp_managed_module(model)):
        remedy = "Shard it by tp_plan, or call model.generate inside kvrecall.attach."
        raise ParameterError("model", "a model that each process can call alone", "one sharded by FSDP or ZeRO-3", remedy)
