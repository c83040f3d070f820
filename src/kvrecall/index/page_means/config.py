"""The hyper-parameter of page means, and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.cache.blocks import block_size_on
from kvrecall.core.errors import ParameterError
from kvrecall.index.base import LayerShape
from kvrecall.index.table import RowLayout
from kvrecall.parts import Part


@dataclass(frozen=True)
class PageMeans(Part):
    """Adds one row per page of `page_tokens` tokens: its mean key and mean value, counted once for each token of the page that
    is not attended (RetroInfer's estimate, for the whole zone and with any search).

    Fewer tokens per page estimate better and take more memory: 4 D / page_tokens bytes per token in 16-bit types.
    """

    role: ClassVar[str] = "rest"
    name: ClassVar[str] = "page-means"

    page_tokens: int = 64

    def __post_init__(self) -> None:
        if not isinstance(self.page_tokens, int) or self.page_tokens < 2:
            raise ParameterError("page_tokens", "an integer >= 2", self.page_tokens, "The default is 64.")

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        """Device bytes of the means, and of the rows of an unfinished page, for a sequence of `tokens` tokens."""
        begun = min(tokens, self.page_tokens - 1)  # most rows of an unfinished page
        row = shape.kv_heads * 2 * shape.head_dim * shape.dtype.itemsize
        return self.layout(shape, block_size_on(shape.device)).nbytes(tokens) + begun * row

    def layout(self, shape: LayerShape, block_size: int) -> RowLayout:
        """Layout of a block: one row per whole page, mean key and mean value side by side."""
        return RowLayout(shape.kv_heads, 2 * shape.head_dim, shape.dtype, self.page_tokens, block_size)
