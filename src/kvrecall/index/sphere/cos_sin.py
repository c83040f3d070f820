"""Mean cos and sin of the rotary embedding over spans of neighbouring positions, for centres."""

from __future__ import annotations

from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor

from kvrecall.core.launch import cdiv
from kvrecall.core.structs import lasting_tensors
from kvrecall.index.statistics import Rotary

SPAN = 64
"""Neighbouring positions that share a centre. A table of 1M positions has 16 MB at D = 128. Spans of 16 would find 0.5 % more
with 4 times the memory."""
_PIECE_SPANS = 64
"""Spans that are computed at a time. A fixed number, so that results do not depend on the request; bounds the temporaries to
2 * 4,096 * D * 4 bytes."""


class CosSinTable:
    """Mean cos and sin of the rotary embedding over every span of positions, from the zone's first token on, fp32 `[R, D]`."""

    def __init__(self, rotary: Rotary, first: int, device: torch.device) -> None:
        """first: position of the zone's first token. The embedding owns its tables, so the caller must keep it alive."""
        self._rotary, self._first, self._device, self._partner = ref(rotary), first, device, rotary.partner
        with lasting_tensors():
            nothing = torch.empty(0, rotary.partner.shape[0], device=device, dtype=torch.float32)
        self._table = nothing, nothing
        self.stride = 0
        """`pair_stride` of the table."""

    def of(self, tokens: int) -> tuple[Tensor, Tensor]:
        """(cos, sin) with at least a row for each span of `tokens` tokens. A longer table is a new tensor; readers by address
        must keep their own. Two threads may both compute it, with equal results."""
        table, wanted = self._table, spans_of(tokens)
        if wanted > table[0].shape[0]:
            table = self._longer(table, wanted)
            self.stride, self._table = pair_stride(*table, self._partner), table
        return table

    def _longer(self, table: tuple[Tensor, Tensor], wanted: int) -> tuple[Tensor, Tensor]:
        have = table[0].shape[0]
        wanted = max(wanted, min(spans_of(have * SPAN * 9 // 8), wanted + 16 * _PIECE_SPANS))
        rotary = self._rotary()
        assert rotary is not None
        cos, sin = [table[0]], [table[1]]
        for span in range(have, wanted, _PIECE_SPANS):
            turns = rotary.cos_sin(self._first + span * SPAN, _PIECE_SPANS * SPAN)
            for side, turn in zip((cos, sin), turns, strict=True):
                side.append(turn.unflatten(0, (_PIECE_SPANS, SPAN)).mean(1).to(self._device))
        with lasting_tensors():
            return torch.cat(cos), torch.cat(sin)


def spans_of(tokens: int) -> int:
    """Rows of a table for `tokens` tokens, rounded up to whole pieces."""
    return _PIECE_SPANS * cdiv(tokens, _PIECE_SPANS * SPAN)


def pair_stride(cos: Tensor, sin: Tensor, partner: Tensor) -> int:
    """The distance N of coordinates with the same turns: coordinate i is turned with i + N where i // N is even. 0 if they have
    no such distance.

    cos, sin `[R, D]`; partner int64 `[D]` on the CPU. Embeddings that turn halves or neighbours have one, also where they turn
    the first coordinates alone: those behind are pairs of any kind, since they are not turned.
    """
    own = torch.arange(len(partner), device="cpu")
    turned = partner != own
    stride = int((partner - own)[turned].abs().max()) if turned.any() else max(1, len(own) // 2)
    wanted = torch.where(own // stride % 2 == 0, own + stride, own - stride)
    inside = wanted < len(own)
    if not torch.equal(partner[turned], wanted[turned]) or (turned[wanted[inside]] != turned[inside]).any():
        return 0
    if cos.is_meta:  # sizes alone are asked for
        return stride
    there, other = own[inside].to(cos.device), wanted[inside].to(cos.device)
    same = torch.equal(cos[:, there], cos[:, other]) and torch.equal(sin[:, there], -sin[:, other])
    return stride if same else 0


_cos_sin: WeakKeyDictionary[Rotary, dict[tuple[int, torch.device], CosSinTable]] = WeakKeyDictionary()
"""Layers with the same rotary embedding share a table, which lives as long as the embedding."""


def cos_sin_table(rotary: Rotary, first: int, device: torch.device) -> CosSinTable:
    """The table of an embedding on a device."""
    tables = _cos_sin.setdefault(rotary, {})
    if (first, device) not in tables:
        tables[first, device] = CosSinTable(rotary, first, device)
    return tables[first, device]
