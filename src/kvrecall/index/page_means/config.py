"""The page means' hyper-parameter, and what they cost."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.core.errors import ParameterError
from kvrecall.index.base import LayerShape
from kvrecall.parts import Part


@dataclass(frozen=True)
class PageMeans(Part):
    """Every page of `page_tokens` tokens is one row more, its mean key and mean value, which counts as often as it has tokens
    that are not attended (RetroInfer's estimate, for all of the zone and beside any search).

    Fewer tokens per page estimate better and take more memory: 4 D / page_tokens bytes per token in 16-bit types.
    """

    role: ClassVar[str] = "rest"
    name: ClassVar[str] = "page-means"

    page_tokens: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.page_tokens, int) or self.page_tokens < 2:
            raise ParameterError("page_tokens", "an integer >= 2", self.page_tokens, "The default is 64.")

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Device bytes that the means, and the rows of a page that is not whole, take for a sequence of `tokens` tokens."""
        begun = min(tokens, self.page_tokens - 1)  # rows that wait for their page to be whole, at most
        return shape.kv_heads * (tokens // self.page_tokens + begun) * 2 * shape.head_dim * shape.dtype.itemsize
