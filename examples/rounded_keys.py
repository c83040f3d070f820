"""A method of one's own, index included: keys rounded to 8 bits, all of them scored in every search.

    import kvrecall
    kvrecall.methods.register("rounded-keys", "examples.rounded_keys", "RoundedKeys")
    cache = kvrecall.RetrievalCache(model.config, kvrecall.methods.get("rounded-keys", top_k=64))

It is two classes: the index says what a token's summary is and how queries score it (`RoundedConfig`), the method has the
hyper-parameters as fields (`RoundedKeys`). Windows, host rows, block tables, triggers, reads of selected rows, attention,
counters, forks and sessions come with them. So do captured steps on a GPU, and pages of vLLM, if the line above runs in its
processes, too (docs/design/engine.md):

    llm = vllm.LLM(MODEL, attention_backend="CUSTOM", additional_config={"kvrecall": {"method": "rounded-keys"}})
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from kvrecall.index.base import LayerShape
from kvrecall.index.tokens import TokenConfig
from kvrecall.methods.base import Method


@dataclass(frozen=True)
class RoundedConfig(TokenConfig):
    """Keys rounded to 8 bits: D + 4 bytes per token and KV head."""

    name: ClassVar[str] = "rounded-keys"

    def tables(self, shape: LayerShape) -> dict[str, tuple[int, torch.dtype]]:
        return {"codes": (shape.head_dim, torch.int8), "scale": (1, torch.float32)}

    def summaries(self, keys: Tensor) -> tuple[Tensor, ...]:
        """Codes, and the scale by which they are to be multiplied."""
        keys = keys.float()
        scale = keys.abs().amax(-1, keepdim=True) / 127
        return torch.where(scale > 0, keys / scale, 0.0).round().to(torch.int8), scale

    def scores(self, queries: Tensor, summaries: Sequence[Tensor]) -> Tensor:
        """Inner products, summed in float64, so that equal keys score the same wherever they lie."""
        codes, scale = summaries
        return (queries.double() @ codes.double().transpose(-1, -2) * scale.transpose(-1, -2)).float()


@dataclass(frozen=True, kw_only=True)
class RoundedKeys(Method):
    """Scores every key, rounded to 8 bits, and fetches the best `top_k`: an example of a method of one's own."""

    name: ClassVar[str] = "rounded-keys"
    paper: ClassVar[str] = "an example"

    def own_index(self) -> RoundedConfig:
        return RoundedConfig()
