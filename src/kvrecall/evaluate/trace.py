"""Captures queries, keys and values of a real model, so that methods can be replayed without the model.

Tensors of a file, for layer N: `layer.N.keys` and so on (`LayerTrace`), and `layer.N.key_mean`, `.key_covariance`,
`.query_second` fp32 as in files of key statistics. For each different rotary embedding, number K: `rotary.K.cos` and `.sin`
fp32 `[positions, D]` and `.partner` int64 `[D]`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from safetensors import safe_open
from torch import Tensor

from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.statistics import statistics_of
from kvrecall.core.errors import InputFileError, ParameterError
from kvrecall.core.whole_files import first_mistake, parse_json, write_tensors
from kvrecall.engine.prefill import prefill
from kvrecall.index.base import LayerShape
from kvrecall.index.statistics import KEPT_TENSORS, KeyStatistics, LayerStatistics, Rotary
from kvrecall.methods.full import Full

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TENSORS = ("keys", "values", "queries", "prompt_queries")


@dataclass(frozen=True)
class LayerTrace:
    """One layer of one sequence, post-RoPE. Query s sees the tokens 0 .. prompt_tokens + s, including its own.

    keys, values: `[H_kv, prompt_tokens + steps, D]`; queries: `[steps, H_q, D]`, of the decode steps; prompt_queries:
    `[H_q, W, D]`, of the prompt's last W tokens, for methods that use them. statistics: of the model's keys, with the rotary
    embedding of all positions; None if not recorded.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor
    prompt_queries: Tensor
    statistics: LayerStatistics | None = field(default=None, compare=False)

    @property
    def shape(self) -> LayerShape:
        """Of the layer's cache."""
        heads, _, dim = self.keys.shape
        return LayerShape(1, self.queries.shape[1], heads, dim, self.keys.dtype, self.keys.device, self.statistics)


@dataclass(frozen=True)
class TraceInfo:
    """The origin of a trace. scaling: factor of the attention logits."""

    model: str
    prompt_tokens: int
    steps: int
    scaling: float
    layers: tuple[int, ...]
    text: str = ""


Whole = Annotated[int, Field(ge=0, le=2**53)]


class _Statistics(BaseModel):
    """Layers with statistics and rotary embeddings; see `to_tensors`."""

    model_config = ConfigDict(strict=True, extra="forbid")

    layers: list[Whole]
    rotaries: list[Whole]
    tokens: list[Whole]


class _Metadata(BaseModel):
    """`TraceInfo` in a file; untrusted, so every field is checked."""

    model_config = ConfigDict(strict=True, extra="forbid", allow_inf_nan=False)

    model: str
    prompt_tokens: int = Field(ge=1)
    steps: int = Field(ge=1)
    scaling: float = Field(gt=0)
    layers: list[Annotated[int, Field(ge=0)]] = Field(min_length=1)
    text: str = ""
    calibration: _Statistics | None = None


@dataclass(frozen=True)
class Trace:
    """A capture: its origin and its layers by number."""

    info: TraceInfo
    layers: dict[int, LayerTrace]

    def save(self, path: Path) -> None:
        """Writes one safetensors file; the origin is in its metadata. After OutputFileError there is no file."""
        tensors = {}
        for number, layer in self.layers.items():
            for name in _TENSORS:
                tensors[f"layer.{number}.{name}"] = getattr(layer, name).contiguous()
        known = {number: layer.statistics for number, layer in self.layers.items() if layer.statistics is not None}
        more, told = to_tensors(known, self.info.prompt_tokens + self.info.steps)
        tensors |= more
        metadata = {"kvrecall": json.dumps(asdict(self.info) | ({"calibration": told} if known else {}))}
        write_tensors(path, tensors, metadata)

    @staticmethod
    def load(path: Path) -> Trace:
        """Reads what `save` wrote; raises InputFileError for anything else."""
        try:
            with safe_open(path, framework="pt") as file:
                told = (file.metadata() or {}).get("kvrecall")
                if told is None:
                    raise ValueError("its metadata names no model and no layers")
                held = _Metadata.model_validate(parse_json(told)).model_dump()
                calibration = held.pop("calibration")
                held["layers"] = tuple(dict.fromkeys(held["layers"]))
                info = TraceInfo(**held)
                layers = {n: _layer(file, n, info) for n in info.layers}
                if calibration is not None:
                    shapes = {n: (layer.keys.shape[0], layer.keys.shape[2]) for n, layer in layers.items()}
                    known = from_file(file, calibration, shapes, info.prompt_tokens + info.steps)
                    layers = {n: replace(layer, statistics=known.get(n)) for n, layer in layers.items()}
        except Exception as error:  # safetensors raises its own types for a broken file
            said = first_mistake(error) if isinstance(error, ValidationError) else error
            raise InputFileError(path, f"not a trace ({said})", "Make one with `kvrecall trace`.") from None
        return Trace(info, layers)


def _layer(file: Any, number: int, info: TraceInfo) -> LayerTrace:
    """A layer of an open file; raises ValueError if its tensors do not match the metadata."""
    there = set(file.keys())
    for name in _TENSORS:
        if f"layer.{number}.{name}" not in there:
            raise ValueError(f"layer {number} has no {name}")
    read = LayerTrace(*(file.get_tensor(f"layer.{number}.{name}") for name in _TENSORS))
    if read.keys.ndim != 3 or read.queries.ndim != 3 or read.prompt_queries.ndim != 3:
        raise ValueError(f"layer {number}: expected tensors of three dimensions")
    (heads, _, dim), query_heads, watched = read.keys.shape, read.queries.shape[1], read.prompt_queries.shape[1]
    if not (heads and dim and query_heads) or query_heads % heads:
        raise ValueError(f"layer {number}: {query_heads} query heads of {dim} numbers do not share {heads} KV heads")
    tokens = info.prompt_tokens + info.steps
    expected = {
        "keys": (heads, tokens, dim), "values": (heads, tokens, dim), "queries": (info.steps, query_heads, dim),
        "prompt_queries": (query_heads, min(watched, info.prompt_tokens), dim),
    }  # fmt: skip
    for name, shape in expected.items():
        tensor = getattr(read, name)
        if tuple(tensor.shape) != shape:
            raise ValueError(f"layer {number}: expected {name} of shape {list(shape)}, got {list(tensor.shape)}")
        if tensor.dtype != read.keys.dtype or tensor.dtype not in _DTYPES:
            raise ValueError(f"layer {number}: expected {name} of one floating dtype as the keys, got {tensor.dtype}")
        if not tensor.isfinite().all():
            raise ValueError(f"layer {number}: {name} contain NaN or infinity")
    return read


@torch.inference_mode()
def capture(
    model: PreTrainedModel,
    input_ids: Tensor,
    *,
    layers: tuple[int, ...] | None = None,
    steps: int = 32,
    forced: list[int] | None = None,
    observe_queries: int = 2048,
    chunk_tokens: int = 1024,
    name: str = "",
    text: str = "",
    tokenizer: Any = None,
    on_progress: Callable[[int, int], None] | None = None,
) -> Trace:
    """Runs a prompt `[1, T]` and `steps` greedy tokens under full attention and records the chosen layers.

    forced: tokens to decode instead of the greedy ones (a second turn, a given answer); fewer than `steps` are allowed.
    observe_queries: how many of the prompt's last queries to keep. tokenizer: as in `attach`.
    """
    steps = steps if forced is None else len(forced) + 1
    cache = RetrievalCache(model.config, Full())
    numbers = [layer.number for layer in cache.retrieval_layers]
    chosen = tuple(numbers) if layers is None else layers
    unknown = sorted(set(chosen) - set(numbers))
    if unknown:
        raise ParameterError("layers", f"full-attention layers among {numbers[0]}..{numbers[-1]}", unknown, "Choose others.")
    if input_ids.shape[0] != 1 or input_ids.shape[1] < 2 or steps < 1:
        raise ParameterError(
            "prompt", "one sequence of 2 tokens or more, and 1 step or more", list(input_ids.shape), "Trace one prompt."
        )
    total = input_ids.shape[1] + steps
    tell = None if on_progress is None else (lambda done, _: on_progress(done, total))
    queries: dict[int, list[Tensor]] = {n: [] for n in chosen}
    prompt: dict[int, Tensor] = {}

    def remember(number: int, seen: Tensor) -> None:
        if number in queries and observe_queries:
            before = prompt.get(number, seen[0, :, :0].cpu())
            prompt[number] = torch.cat([before, seen[0].cpu()], 1)[:, -observe_queries:].clone()

    known = statistics_of(model, tokenizer)
    cache.on_queries = remember
    prefill(model, input_ids[:, :-1], cache, chunk_tokens=chunk_tokens, on_progress=tell, expect_tokens=total)
    statistics = frozen({n: known.layers[n] for n in chosen if n in known.layers}, input_ids.shape[1] - 1 + steps)
    cache.on_queries = lambda n, q: queries[n].append(q[0, :, 0].cpu().clone()) if n in queries else None
    token = input_ids[:, -1:]
    with attach(model):
        for step in range(steps):
            out = model(input_ids=token, **cache_argument(cache), use_cache=True)
            greedy = out.logits[:, -1:].argmax(-1)
            token = greedy if forced is None or step >= len(forced) else torch.full_like(greedy, forced[step])
            if tell:
                tell(input_ids.shape[1] + step + 1, total)
    captured = {}
    for layer in cache.retrieval_layers:
        if layer.number in queries and layer.state is not None:
            rows = torch.cat([block.cpu() for block in layer.state.store.blocks(0)], 1)
            decoded = torch.stack(queries[layer.number])
            watched = prompt.get(layer.number, decoded.new_empty(decoded.shape[1], 0, decoded.shape[2]))
            captured[layer.number] = LayerTrace(
                rows[:, :, 0], rows[:, :, 1], decoded, watched, statistics.get(layer.number)
            )  # fmt: skip
    # The last prompt token is the first query, so the position of a query is prompt - 1 + step.
    scaling = float(getattr(_first_attention(model), "scaling", cache.signature.head_dim**-0.5))
    info = TraceInfo(name or cache.signature.model_type, input_ids.shape[1] - 1, steps, scaling, chosen, text)
    return Trace(info, captured)


def _first_attention(model: PreTrainedModel) -> torch.nn.Module:
    return next((m for m in model.modules() if hasattr(m, "scaling") and hasattr(m, "layer_idx")), model)


class TableRotary(Rotary):
    """A rotary embedding at the positions of a trace. Later positions get the values of the last one."""

    def __init__(self, cos: Tensor, sin: Tensor, partner: Tensor) -> None:
        """cos, sin: fp32 `[positions, D]`; partner: int64 `[D]`."""
        self.partner, self._cos, self._sin, self.positions = partner, cos, sin, len(cos)

    def cos_sin(self, first: int, count: int) -> tuple[Tensor, Tensor]:
        at = torch.arange(first, first + count, device="cpu").clamp_max(len(self._cos) - 1)
        return self._cos[at], self._sin[at]

    @property
    def is_identity(self) -> bool:
        return not bool(self._sin.any()) and bool((self._cos == 1).all())


def frozen(known: Mapping[int, LayerStatistics], positions: int) -> dict[int, LayerStatistics]:
    """Statistics by layer without a model. positions: length of the tables. Layers with the same rotary embedding share a
    table."""
    tables: dict[int, TableRotary] = {}
    made = {}
    for number, layer in known.items():
        rotary = layer.rotary
        if id(rotary) not in tables:
            tables[id(rotary)] = TableRotary(*rotary.cos_sin(0, positions), rotary.partner)
        made[number] = LayerStatistics(tables[id(rotary)], layer.keys)
    return made


def to_tensors(known: Mapping[int, LayerStatistics], positions: int) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
    """(tensors of a file, `calibration` of its metadata: per layer the number, its table's number and its tokens)."""
    tensors: dict[str, Tensor] = {}
    numbers: dict[int, int] = {}
    told: dict[str, list[int]] = {"layers": [], "rotaries": [], "tokens": []}
    for number, layer in known.items():
        rotary, statistics = layer.rotary, layer.keys
        table = numbers.setdefault(id(rotary), len(numbers))
        if f"rotary.{table}.cos" not in tensors:
            cos, sin = rotary.cos_sin(0, positions)
            partner = rotary.partner.contiguous().clone()
            tensors |= {
                f"rotary.{table}.cos": cos.clone(),
                f"rotary.{table}.sin": sin.clone(),
                f"rotary.{table}.partner": partner,
            }
        for name in KEPT_TENSORS:
            tensors[f"layer.{number}.{name}"] = getattr(statistics, name).float().contiguous()
        told["layers"].append(number)
        told["rotaries"].append(table)
        told["tokens"].append(statistics.tokens)
    return tensors, told


def from_file(
    file: Any, told: Mapping[str, list[int]], shapes: Mapping[int, tuple[int, int]], positions: int
) -> dict[int, LayerStatistics]:
    """Statistics of an open file by layer. told: from `to_tensors`. shapes: (KV heads, D) by layer.

    Raises ValueError for tensors that do not match the rest of the file.
    """
    if not len(told["layers"]) == len(told["rotaries"]) == len(told["tokens"]):
        raise ValueError("calibration: expected lists of one length")
    tables: dict[tuple[int, int], TableRotary] = {}
    made = {}
    for number, table, tokens in zip(told["layers"], told["rotaries"], told["tokens"], strict=True):
        if number not in shapes:
            raise ValueError(f"calibration: expected layers of the trace, got {number}")
        heads, dim = shapes[number]
        if (table, dim) not in tables:
            tables[table, dim] = _table(file, f"rotary.{table}", positions, dim)
        parts = [
            _tensor(file, f"layer.{number}.{name}", torch.float32, (heads, *[dim] * dims)).double()
            for name, dims in KEPT_TENSORS.items()
        ]
        made[number] = LayerStatistics(tables[table, dim], KeyStatistics(tokens, *parts))
    return made


def _table(file: Any, name: str, positions: int, dim: int) -> TableRotary:
    cos, sin = (_tensor(file, f"{name}.{part}", torch.float32, (positions, dim)) for part in ("cos", "sin"))
    partner = _tensor(file, f"{name}.partner", torch.int64, (dim,))
    if not bool(((partner >= 0) & (partner < dim)).all()) or not torch.equal(partner[partner], torch.arange(dim, device="cpu")):
        raise ValueError(f"{name}.partner: expected pairs of coordinates")
    return TableRotary(cos, sin, partner)


def _tensor(file: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if name not in file.keys():  # noqa: SIM118 - not a dict
        raise ValueError(f"there is no {name}")
    held = tuple(file.get_slice(name).get_shape())
    if held != shape:
        raise ValueError(f"expected {name} of shape {list(shape)}, got {list(held)}")
    tensor = file.get_tensor(name)
    if tensor.dtype != dtype:
        raise ValueError(f"expected {name} of {dtype}, got {tensor.dtype}")
    if not tensor.isfinite().all():
        raise ValueError(f"{name} contains NaN or infinity")
    return tensor
