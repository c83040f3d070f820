"""The hyper-parameters of a sphere index."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from kvrecall.cache.blocks import block_size_on
from kvrecall.core.errors import ParameterError, UnknownNameError
from kvrecall.index.base import Captured, IndexConfig, LayerShape, PagedKernels, PagedSizes
from kvrecall.index.sphere.maps import Maps
from kvrecall.index.sphere.pages import CodeLayout
from kvrecall.index.sphere.schedule import PAPER_SCHEDULE, RatioStep, as_steps, check_schedule

if TYPE_CHECKING:
    from kvrecall.index.sphere import PagedCodes, SphereIndex

STAGE_ONE = ("collision", "product")
"""How stage I scores a key: by collisions of its sign patterns with the query's best (the paper), or by the product of the
query with its signs."""
WEIGHT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8}


@dataclass(frozen=True)
class SphereConfig(IndexConfig):
    """The hyper-parameters of a sphere index.

    stage1: see `STAGE_ONE`. weight_dtype: of the stored weights, "bfloat16", "float16" or "float32", or "uint8" for floats of
    eight bits, which need the balanced transform.
    center: subtracts the mean key of its position from each key; needs norms. balance: sends keys and queries through the
    balanced transform (`maps.py`). Both follow from statistics of the model. norms: multiplies products of stage I by the norms
    of balanced keys. None of these is in the paper.
    """

    name: ClassVar[str] = "sphere"
    captured: ClassVar[Captured | None] = Captured(page_means=True)
    pages_refusal: ClassVar[str] = ""

    gqa: str = "mean_q"
    stage1: str = "collision"
    schedule: tuple[RatioStep | tuple[int | None, float, float], ...] = PAPER_SCHEDULE
    min_candidates_per_k: int = 4
    seed: int = 42
    weight_dtype: torch.dtype | str = "bfloat16"
    center: bool = False
    balance: bool = False
    norms: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = as_steps(self.schedule)
        object.__setattr__(self, "schedule", steps)
        check_schedule(steps)
        if self.stage1 not in STAGE_ONE:
            raise UnknownNameError("stage1", self.stage1, STAGE_ONE)
        if str(self.weight_dtype).removeprefix("torch.") not in WEIGHT_DTYPES:
            raise UnknownNameError("weight_dtype", str(self.weight_dtype), WEIGHT_DTYPES)
        if self.norms and (self.stage1 != "product" or not self.balance):
            raise ParameterError("norms", "False, or True with stage1='product' and balance=True", True, "Set these too.")
        if self.stored_dtype == torch.uint8 and not self.balance:
            remedy = "Keys without it may have any norm, which eight bits do not hold: set balance=True, or take bfloat16."
            raise ParameterError("weight_dtype", "a 16 or 32-bit type without the balanced transform", "uint8", remedy)
        if self.center and not self.norms:
            remedy = "Scores of different positions compare only with norms: set stage1, balance and norms too."
            raise ParameterError("center", "False, or True with norms=True", True, remedy)

    @property
    def steps(self) -> tuple[RatioStep, ...]:
        """The schedule as records."""
        return self.schedule  # type: ignore[return-value]

    @property
    def stored_dtype(self) -> torch.dtype:
        """dtype of the stored weights."""
        return WEIGHT_DTYPES[str(self.weight_dtype).removeprefix("torch.")]

    @property
    def needs_statistics(self) -> bool:
        return self.center or self.balance

    def build(self, shape: LayerShape) -> SphereIndex:
        from kvrecall.index.sphere import SphereIndex

        return SphereIndex(shape, self)

    def layout(self, shape: LayerShape, block_size: int) -> CodeLayout:
        """The layout of a block of codes."""
        return CodeLayout(shape.kv_heads, shape.head_dim, self.stored_dtype, self.norms, block_size)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        return self.layout(shape, block_size_on(shape.device)).nbytes(tokens)

    def why_unpaged(self) -> str:
        if self.stage1 == "product":
            return ""
        return f'stage1={self.stage1} counts the keys of a whole sequence, not those of a block; set "stage1": "product"'

    def paged_bytes(self, shape: LayerShape, block_size: int) -> int:
        return self.layout(shape, block_size).block_bytes

    def paged(self, shape: LayerShape, block_size: int) -> PagedCodes:
        from kvrecall.index.sphere import PagedCodes

        return PagedCodes(self, shape, block_size)

    def paged_kernels(self, shape: LayerShape, sizes: PagedSizes, like: PagedKernels | None = None) -> PagedKernels:
        from kvrecall.index.sphere.kernels.paged import CodeKernels

        assert like is None or isinstance(like, CodeKernels)
        return CodeKernels(self, shape, sizes, like)

    def paged_candidates(self, longest: int, top_k: int) -> Tensor:
        """As `stage_sizes`."""
        ends = [0, *(min(longest + 1, step.below_tokens or longest + 1) for step in self.steps)]
        least = max(self.min_candidates_per_k, 1) * top_k
        made = []
        for step, (start, stop) in zip(self.steps, pairwise(ends), strict=True):
            tokens = torch.arange(start, max(start, stop), dtype=torch.float64, device="cpu")
            made.append(torch.minimum(tokens, torch.ceil(tokens * step.candidate_ratio).clamp_min(least)))
        return torch.cat(made).to(torch.int32)

    def shared_nbytes(self, shape: LayerShape, layers: int, tokens: int) -> int:
        table = Maps.turns_nbytes(shape.head_dim, tokens) if self.center else 0
        return layers * Maps.nbytes(shape.head_dim, shape.kv_heads, self.center, self.balance) + table
