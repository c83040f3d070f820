"""Key statistics of a served model, from one forward pass of the engine's own model at its start.

The tokens are those that transformers' backend takes (`backends.transformers.statistics`). Pages do not exist yet, so the
layers attend to the pass's own keys. Rotary embeddings come from a small transformers model with the same config.
"""

# Only imported where vLLM is installed.
# pyright: reportMissingImports=false

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from functools import partial
from time import perf_counter
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PretrainedConfig

from kvrecall.attend.chunk import attend_block, attend_causal
from kvrecall.backends.transformers.families import Heads
from kvrecall.backends.transformers.rotary import Rotaries, ask_model
from kvrecall.backends.transformers.statistics import Source
from kvrecall.core.errors import StatisticsError
from kvrecall.core.structs import AttentionParams
from kvrecall.index.statistics import KeyStatistics, LayerStatistics, Rotary, flaw
from kvrecall.merge import merge_in_turn, with_sinks

_log = logging.getLogger("vllm.kvrecall")
_NARROW: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 32, "vocab_size": 64}
"""Sizes that do not affect the rotary embedding, if the head size is given."""
_FEW_HEADS = {"num_attention_heads": 2, "num_key_value_heads": 2, "num_kv_heads": 2, "n_head": 2}
"""For families whose heads are as large as the hidden size says."""


class Observer:
    """The attention of one text, in chunks, over keys that it keeps itself."""

    def __init__(self) -> None:
        self._rows: dict[int, Tensor] = {}
        self._queries: dict[int, list[Tensor]] = {}

    def attend(self, number: int, queries: Tensor, keys: Tensor, values: Tensor, params: AttentionParams) -> Tensor:
        """The attention `[T, H_q, D]` of a layer's next tokens: queries `[T, H_q, D]`; keys, values `[T, H_kv, D]`."""
        q, k, v = (x.transpose(0, 1) for x in (queries, keys, values))
        past, how = self._rows.get(number), (params.scaling, params.softcap)
        own = attend_causal(q, k, v, *how)
        parts = [] if past is None else [attend_block(q, past, *how)]
        self._keep(number, k, v)
        self._queries.setdefault(number, []).append(q.clone())
        return merge_in_turn(with_sinks([own], params.sink_logits), parts).out[0].transpose(0, 1).to(queries.dtype)

    @contextmanager
    def attending(self, layers: Mapping[int, Any]) -> Iterator[None]:
        """Takes the attention of vLLM's own layers with a sliding window, by number, which attend to nothing without pages."""
        for number, layer in layers.items():
            layer.impl.forward = partial(self._in_window, number)
        try:
            yield
        finally:
            for layer in layers.values():
                del layer.impl.forward

    def _in_window(
        self, number: int, layer: Any, queries: Tensor, keys: Tensor, values: Tensor, cache: Any, metadata: Any, output: Tensor,
        **more: Any,
    ) -> Tensor:  # fmt: skip
        """As a layer's `AttentionImpl.forward`: a token attends to the last `sliding_window` tokens, itself included."""
        impl, rows = layer.impl, self._keep(number, keys.transpose(0, 1), values.transpose(0, 1))
        total, own, group = rows.shape[1], len(queries), queries.shape[1] // len(rows)
        k, v = (x.repeat_interleave(group, 0).float() for x in rows.unbind(2))
        logits = queries.transpose(0, 1).float() @ k.mT * impl.scale
        if impl.logits_soft_cap:
            logits = impl.logits_soft_cap * torch.tanh(logits / impl.logits_soft_cap)
        places = torch.arange(total, device=rows.device)
        back = places[total - own :, None] - places
        logits.masked_fill_((back < 0) | (back >= layer.sliding_window), float("-inf"))
        sinks = getattr(impl, "sinks", None)
        if sinks is not None:  # one more place, without a value
            logits = torch.cat([logits, sinks.float().view(-1, 1, 1).expand(-1, own, 1)], 2)
        return output.copy_((logits.softmax(-1)[..., :total] @ v).transpose(0, 1))

    def _keep(self, number: int, keys: Tensor, values: Tensor) -> Tensor:
        """Adds keys, values `[H_kv, T, D]`. Returns all rows of the layer, `[H_kv, n, K|V, D]`."""
        past, rows = self._rows.get(number), torch.stack([keys, values], 2)
        self._rows[number] = made = rows if past is None else torch.cat([past, rows], 1)
        return made

    def statistics(self, number: int, rotary: Rotary) -> KeyStatistics:
        """Of the layer's tokens so far."""
        return KeyStatistics.of(self._rows[number][:, :, 0], torch.cat(self._queries[number], 1), rotary)


def source_of(model_config: Any) -> Source:
    """The tokens of vLLM's `ModelConfig`."""
    tokenizer = None
    with suppress(Exception):  # no files, a library that is missing
        tokenizer = AutoTokenizer.from_pretrained(
            model_config.tokenizer, revision=model_config.tokenizer_revision, trust_remote_code=model_config.trust_remote_code
        )
    return Source.of(model_config.hf_config, tokenizer)


def compute(
    model: Any, config: Any, observer: Observer, rotaries: Mapping[int, Rotary], metadata: Callable[[int, int], Any]
) -> dict[int, LayerStatistics]:
    """Statistics of the layers in `rotaries`, by number, for this rank's heads. Their attention must be the observer's.

    model: vLLM's. config: `VllmConfig`. metadata: of other layers, for a first position and a count of tokens. Every rank must
    call it. Raises StatisticsError for unfit statistics.
    """
    start, source, text = perf_counter(), source_of(config.model_config), config.model_config.hf_text_config
    size = config.scheduler_config.max_num_batched_tokens
    for first in range(0, len(source.ids), size):
        ids = source.ids[first : first + size]
        _forward(model, config, ids, first, metadata(first, len(ids)))
    found = {number: _of_all_queries(observer.statistics(number, rotary), text) for number, rotary in rotaries.items()}
    if unfit := flaw(found, len(set(source.ids)), text.vocab_size, text.hidden_size):
        raise StatisticsError(config.model_config.model, "keys that describe a text", unfit, 'Serve "method": "exact".')
    log = _log.warning if source.random else _log.info
    log("kvrecall: statistics of the model's keys from %s, %.1f s", source.text, perf_counter() - start)
    return {number: LayerStatistics(rotaries[number], own) for number, own in found.items()}


@torch.no_grad()
def _forward(model: Any, config: Any, ids: tuple[int, ...], first: int, metadata: Any) -> None:
    """One pass of the model over the tokens from position `first` on, through all pipeline stages."""
    from vllm.distributed import get_pp_group, get_tp_group
    from vllm.forward_context import set_forward_context
    from vllm.sequence import IntermediateTensors

    device, stages = config.device_config.device, get_pp_group()
    positions = torch.arange(first, first + len(ids), device=device)
    if config.model_config.uses_mrope:
        positions = positions.expand(3, -1)
    before = None
    if not stages.is_first_rank:
        before = IntermediateTensors(stages.recv_tensor_dict(all_gather_group=get_tp_group()))
    eager = {"skip_compiled": True} if "skip_compiled" in inspect.signature(set_forward_context).parameters else {}
    with set_forward_context(metadata, config, num_tokens=len(ids), **eager):
        out = model(
            input_ids=torch.tensor(ids, device=device, dtype=torch.int64), positions=positions, intermediate_tensors=before
        )
    if not stages.is_last_rank:
        stages.send_tensor_dict(out.tensors, all_gather_group=get_tp_group())


def _of_all_queries(own: KeyStatistics, text: PretrainedConfig) -> KeyStatistics:
    """Where several ranks have the same KV head, the statistics with the queries of all of them."""
    from vllm.distributed import get_tensor_model_parallel_rank, get_tensor_model_parallel_world_size, get_tp_group

    ranks, heads = get_tensor_model_parallel_world_size(), Heads.of(text, 0).kv
    copies = ranks // heads
    if copies < 2:
        return own
    everyone = get_tp_group().all_gather(own.query_second, 0)
    first = get_tensor_model_parallel_rank() // copies * copies
    return KeyStatistics(own.tokens, own.key_mean, own.key_covariance, everyone[first : first + copies].mean(0, keepdim=True))


def rotaries_of_config(config: PretrainedConfig) -> Rotaries:
    """The rotary embeddings of a model of this config. Raises StatisticsError if one cannot be found."""
    text = config.get_text_config(decoder=True)
    dim = Heads.of(text, 0).dim
    few = _NARROW | _FEW_HEADS | {"hidden_size": 2 * dim, "n_embd": 2 * dim, "d_model": 2 * dim}
    if (expand := getattr(text, "mamba_expand", None)) and hasattr(text, "mamba_n_heads"):  # as large as the hidden size says
        few |= {"mamba_n_heads": 1, "mamba_d_head": expand * 2 * dim, "mamba_n_groups": 1}
    got, cause = "a model that cannot be made small", None
    for sizes in ({"head_dim": dim} | _NARROW, few):
        try:
            found = ask_model(_small_model(text, sizes))
        except (ValueError, TypeError, AttributeError, RuntimeError) as error:  # families differ in the sizes that fit together
            cause = error
            continue
        if not found.unknown:
            return found
        got = f"others in layers {', '.join(map(str, found.unknown))}"
    expected = "layers whose rotary embedding can be found"
    raise StatisticsError(text.model_type, expected, got, 'Serve "method": "exact".') from cause


def _small_model(config: PretrainedConfig, sizes: Mapping[str, Any]) -> Any:
    """A model of this config with other sizes, as far as the config has them, and random weights."""
    text: Any = deepcopy(config)
    for name, size in sizes.items():
        if name == "head_dim" or hasattr(text, name):
            before = getattr(text, name, None)
            setattr(text, name, [size] * len(before) if isinstance(before, (list, tuple)) else size)
    for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
        try:
            setattr(text, name, None)
        except StrictDataclassError:  # some must be numbers
            setattr(text, name, 0)
    with torch.device("cpu"), torch.random.fork_rng(devices=[]):
        return AutoModelForCausalLM.from_config(text, attn_implementation="eager", dtype=torch.float32).eval()
