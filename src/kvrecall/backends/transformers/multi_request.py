"""Several RetrievalCaches as one cache of one call of the model: a step of sequences that belong to different requests.

1. Each row of the batch is one sequence of one member. A layer of the joint cache hands each member's layer its own rows, so
   every member stores and attends as it does alone, whatever its method and its length.
2. The call is one forward pass with a part for each member (`forward_pass`): accepted completely, or undone.
3. After an error in a member's own attention, this member leaves the step and the others go on. An error of the call itself
   undoes the step for all.

Members must have retrieval layers only, because transformers' other layers keep tensors of one batch. The call must pass
positions, because the rows have different lengths; a model that asks for a common length is refused (`NotTogetherError`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PretrainedConfig
from transformers.cache_utils import Cache

from kvrecall.backends.base import attend_together
from kvrecall.backends.transformers import forward_pass
from kvrecall.backends.transformers.cache import RetrievalCache
from kvrecall.backends.transformers.forward_pass import CachePass, ForwardPass, Inputs
from kvrecall.backends.transformers.layer import RetrievalLayer, TaggedLayer
from kvrecall.backends.transformers.owner import Claim
from kvrecall.core.errors import NotAttachedError, ParameterError, ShapeError, UnsupportedModelError
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.pipeline import SharedPast
from kvrecall.layer.state import LayerState


class NotTogetherError(UnsupportedModelError):
    """Rows of several requests cannot be in one call of this model; nothing of the call is stored."""


class JointCache(Cache):
    """The cache for one step of several members; rows are in the members' order.

    The call takes no attention mask: each member knows its prompt's padding, and how many of the call's tokens are its own.
    """

    def __init__(self, members: Sequence[RetrievalCache], tokens: Sequence[int] | None = None) -> None:
        """members: different caches of one model that hold their prompts. tokens: of each member in a row of the call, the
        first ones; such tokens are chunks, and rows that members share are read once for all. By default a row is a decode
        step of one token. Raises ParameterError for other caches."""
        if not members or len(set(map(id, members))) != len(members):
            raise ParameterError("members", "one or more different caches", len(members), "Give each request its own cache.")
        for member in members:
            if not joinable(member):
                remedy = "Decode in turn, one call per request."
                raise ParameterError("members", "caches that hold tokens, in retrieval layers only", repr(member), remedy)
        self.members = list(members)
        ends = torch.tensor([member.sequences for member in members], dtype=torch.int64, device="cpu").cumsum(0).tolist()
        self.rows = [slice(end - member.sequences, end) for end, member in zip(ends, members, strict=True)]
        """The batch rows of each member."""
        self.tokens = [1] * len(members) if tokens is None else list(tokens)
        """Of each member in a row."""
        self.failed: dict[int, Exception] = {}
        """By number of the member: why it did not take part in the last step. Such a member is unchanged."""
        self._pass: ForwardPass | None = None
        chunks, layers = None if tokens is None else self.tokens, range(len(members[0].layers))
        super().__init__(layers=[JointLayer(self.members, self.rows, self.failed, i, chunks) for i in layers])

    @property
    def running(self) -> ForwardPass | None:
        """The current forward pass."""
        return self._pass if self._pass is not None and self._pass.parts else None

    @property
    def sequences(self) -> int:
        """Rows of the batch."""
        return self.rows[-1].stop

    @property
    def signature(self) -> object:
        """The model that the members were made for."""
        return self.members[0].signature

    def belongs_to(self, config: PretrainedConfig) -> bool:
        """Whether a layer's config describes the model that all members were made for."""
        return all(member.belongs_to(config) for member in self.members)

    def open_pass(self, inputs: Inputs, claim: Claim) -> ForwardPass:
        """Begins a step. If it raises, the members are unchanged."""
        if (inputs.sequences, inputs.tokens) != (self.sequences, max(self.tokens)):
            expected, got = [self.sequences, max(self.tokens)], [inputs.sequences, inputs.tokens]
            raise ShapeError("input_ids", str(expected), got, "Give each sequence of each member its tokens.")
        if inputs.mask is not None:
            raise ShapeError("attention_mask", "none", "one", "A decode step has no padding.")
        for member in self.members:
            member.settle()
        self.failed.clear()
        parts = []
        for member, rows, tokens in zip(self.members, self.rows, self.tokens, strict=True):
            ids = None if inputs.ids is None else inputs.ids[rows, :tokens]
            parts.append(CachePass(member, Inputs(member.sequences, tokens, ids, None)))
        self._pass = ForwardPass(claim, parts, self.failed)
        return self._pass

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        if self.running is None or forward_pass.current() is not self.running:
            raise NotAttachedError
        layer: Any = self.layers[layer_idx]
        return layer.update(key_states, value_states)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Raises NotTogetherError: the rows have no length in common."""
        layer: Any = self.layers[layer_idx]
        return layer.get_seq_length()

    def get_query_offset(self, layer_idx: int = 0) -> int:
        return 0  # for masks, which a single token does not need

    def align(self) -> None:
        """After an interrupted step: restores the members to their state before it."""
        if self.running is not None and self.running.claim.ended:
            self.running.abandon()
        for member in self.members:
            member.align()


def joinable(cache: RetrievalCache) -> bool:
    """Whether this cache can be a member."""
    plain = all(type(layer) is RetrievalLayer and layer.captured is None for layer in cache.layers)
    return plain and len(cache.layers) == cache.signature.layers and cache.get_seq_length() > 0


class JointLayer(TaggedLayer):
    """One layer of all members."""

    def __init__(
        self, members: list[RetrievalCache], rows: list[slice], failed: dict[int, Exception], number: int,
        chunks: list[int] | None,
    ) -> None:  # fmt: skip
        """The first three as in `JointCache`, which shares them. chunks: tokens of each member in a row, if they are chunks."""
        super().__init__()
        self._chunks = chunks
        self._members, self._rows, self._failed, self.number = members, rows, failed, number
        self._family = members[0].signature.model_type
        self.is_initialized = True

    def attend(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, params: AttentionParams) -> Tensor:
        """Each member stores and attends to its own rows: queries `[rows, H_q, T, D]` -> as queries.

        Rows of a member that failed, in this layer or an earlier one, and tokens that are not its own, are 0.
        """
        if mask is not None:
            raise NotTogetherError(self._family, "a mask for tokens without padding")
        out, shared = torch.zeros_like(queries), self._shared(queries, params)
        for number, (member, rows) in enumerate(zip(self._members, self._rows, strict=True)):
            layer, own = self._of(member), (rows, slice(None), slice(self._chunks[number] if self._chunks else 1))
            if number not in self._failed:
                try:
                    past = shared.get(number)
                    out[own] = layer.attend(queries[own], *layer.update(keys[own], values[own]), None, params, past)
                except Exception as error:  # concerns this member only: its rows, memory, index
                    self._failed[number] = error
        return out

    def _of(self, member: RetrievalCache) -> RetrievalLayer:
        layer = member.layers[self.number]
        assert isinstance(layer, RetrievalLayer)
        return layer

    def _shared(self, queries: Tensor, params: AttentionParams) -> dict[int, list[SharedPast]]:
        """By number of the member, attention of its chunks to the rows that sequences of several members share."""
        groups: dict[tuple[int, int] | None, list[tuple[int, int]]] = {}
        for number, member in enumerate(self._members) if self._chunks else ():
            state = self._of(member).state
            for b, table in enumerate(member.tables or ()):
                if state is not None and number not in self._failed and state.store.host[b].length:
                    groups.setdefault(table.beginning, []).append((number, b))
        made: dict[int, dict[int, SharedPast]] = {}
        for group in groups.values():
            chunks = [self._chunk(number, b, queries) for number, b in group]
            for (number, b), past in zip(group, attend_together(chunks, params) or (), strict=False):
                made.setdefault(number, {})[b] = past
        whole = {number: own for number, own in made.items() if len(own) == self._members[number].sequences}
        return {number: [own[b] for b in range(len(own))] for number, own in whole.items()}

    def _chunk(self, number: int, b: int, queries: Tensor) -> tuple[LayerState, int, Tensor]:
        state = self._of(self._members[number]).state
        assert state is not None and self._chunks is not None
        return state, b, queries[self._rows[number].start + b, :, : self._chunks[number]]

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """As for a single first token, which needs no mask."""
        return int(query_length), 0

    def get_seq_length(self) -> int:
        raise NotTogetherError(self._family, "a model that asks for one length of all rows, which belong to different requests")
