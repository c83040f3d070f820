"""What a sphere index is made with."""

from __future__ import annotations

from dataclasses import dataclass
from math import isfinite
from typing import TYPE_CHECKING, ClassVar

import torch

from kvrecall.errors import ParameterError, UnknownNameError
from kvrecall.index.base import IndexConfig, LayerShape
from kvrecall.index.sphere.maps import OBSERVED_QUERIES, Maps
from kvrecall.index.sphere.schedule import PAPER_SCHEDULE, RatioStep, as_steps, check_schedule

if TYPE_CHECKING:
    from kvrecall.index.sphere import SphereIndex

STAGE_ONE = ("collision", "product")
"""How the first stage scores a key: collisions of its sign patterns with the query's best (the paper), or the product of the
query with its signs."""
WEIGHT_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "uint8": torch.uint8}


@dataclass(frozen=True)
class SphereConfig(IndexConfig):
    """What a sphere index is made with.

    stage1: see `STAGE_ONE`. weight_dtype: of the stored weights, "bfloat16", "float16" or "float32", or "uint8" for floats of
    eight bits, which need the balanced transform.
    center, balance: whether the mean key is taken from all keys, and whether they and the queries go through the balanced
    transform (`maps.py`); both are fitted to each sequence, one to its prompt's last queries too. norms: whether products of
    stage I are multiplied by the norms of balanced keys. refit_growth: a sequence whose zone has grown to so many times the
    tokens that its centre and transform were fitted to gets new ones, and new codes; None: it keeps its first. None of that is
    in the paper.
    """

    name: ClassVar[str] = "sphere"

    gqa: str = "mean_q"
    stage1: str = "collision"
    schedule: tuple[RatioStep | tuple[int | None, float, float], ...] = PAPER_SCHEDULE
    min_candidates_per_k: int = 4
    seed: int = 42
    weight_dtype: torch.dtype | str = "bfloat16"
    center: bool = False
    balance: bool = False
    norms: bool = False
    refit_growth: float | None = 1.5

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
        growth = self.refit_growth
        if growth is not None and not (isinstance(growth, float | int) and isfinite(growth) and growth > 1):
            remedy = "1.5 codes every key about three times in all; None keeps what was fitted first."
            raise ParameterError("refit_growth", "a finite number > 1, or None", growth, remedy)

    @property
    def steps(self) -> tuple[RatioStep, ...]:
        """The schedule as records."""
        return self.schedule  # type: ignore[return-value]

    @property
    def stored_dtype(self) -> torch.dtype:
        """The weights' dtype."""
        return WEIGHT_DTYPES[str(self.weight_dtype).removeprefix("torch.")]

    @property
    def observed_queries(self) -> int:
        return OBSERVED_QUERIES if self.balance else 0

    @property
    def needs_calibration(self) -> bool:
        return self.center or self.balance

    def build(self, shape: LayerShape) -> SphereIndex:
        from kvrecall.index.sphere import SphereIndex

        return SphereIndex(shape, self)

    def nbytes(self, shape: LayerShape, tokens: int) -> int:
        from kvrecall.index.sphere import SphereIndex

        maps = Maps.nbytes_per_head(shape.head_dim, self.center, self.balance, self.refit_growth is not None)
        tables = SphereIndex.nbytes_per_token(shape.head_dim, self.stored_dtype, self.norms) * tokens
        return (int(tables) + maps) * shape.kv_heads
