"""ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs (Qi et al.), https://arxiv.org/abs/2602.07721."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvrecall.core.errors import ParameterError
from kvrecall.index.sphere import SphereConfig
from kvrecall.index.sphere.schedule import BALANCED_SCHEDULE, PAPER_SCHEDULE, RatioStep, as_steps
from kvrecall.methods.base import Method


@dataclass(frozen=True, kw_only=True)
class ParisKV(Method):
    """Fixed codes that stay valid as keys drift, searched in two stages.

    1. Keys are normalised and turned by one fixed random rotation, which makes every block of 8 coordinates look like a
       random direction; the nearest of 2^8 sign patterns is its centroid, known before any key is seen.
    2. Stage I counts, per block, whether a key's centroid is among the query's best (six tiers inside the top
       `collision_ratio` of the keys) and keeps the top `candidate_ratio` of the keys.
    3. Stage II estimates their inner products from 4-bit codes and one corrective weight per block; `top_k` are fetched.
    4. New keys wait in a buffer and are encoded in batches of `update_interval`.

    candidate_ratio (beta), collision_ratio (rho): shares in (0, 1]; None takes them from `schedule`, by length of the zone.
    min_candidates_per_k: never rerank fewer than this many candidates per fetched token.
    stage1: "collision" (the paper), or "product": the query's product with a key's signs, which finds more at the same cost and
    does not use collision_ratio. The default gqa is "mean_q", as in the paper's code.
    seed: of the rotation. weight_dtype: of the stored weights, "bfloat16", "float16" or "float32"; "uint8" needs balance.
    balance, norms, center are not in the paper. balance: keys and queries go through a linear transform after which all
    coordinates have equal weight; products stay the same. norms: stage I multiplies its products by the keys' norms, a byte per
    token; needs "product" and balance. center: subtracts the mean key of its position from each key; needs norms.
    Transform and means follow from statistics of the model and its rotary embedding (docs/design/statistics.md).
    """

    name: ClassVar[str] = "pariskv"
    paper: ClassVar[str] = "ParisKV: Fast and Drift-Robust KV-Cache Retrieval for Long-Context LLMs"

    stage1: str = "collision"
    candidate_ratio: float | None = None
    collision_ratio: float | None = None
    schedule: tuple[RatioStep | tuple[int | None, float, float], ...] = PAPER_SCHEDULE
    min_candidates_per_k: int = 4
    seed: int = 42
    weight_dtype: str = "bfloat16"
    center: bool = False
    balance: bool = False
    norms: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "schedule", as_steps(self.schedule))
        super().__post_init__()
        if self.min_candidates_per_k < 1:
            raise ParameterError("min_candidates_per_k", "an integer >= 1", self.min_candidates_per_k, "The default is 4.")

    def own_index(self) -> SphereConfig:
        """Raises ParameterError for ratios outside (0, 1], UnknownNameError for unknown modes."""
        steps = tuple(
            RatioStep(
                s.below_tokens,
                s.candidate_ratio if self.candidate_ratio is None else self.candidate_ratio,
                s.collision_ratio if self.collision_ratio is None else self.collision_ratio,
            )
            for s in as_steps(self.schedule)
        )
        return SphereConfig(
            stage1=self.stage1,
            schedule=steps,
            min_candidates_per_k=self.min_candidates_per_k,
            seed=self.seed,
            weight_dtype=self.weight_dtype,
            center=self.center,
            balance=self.balance,
            norms=self.norms,
        )


@dataclass(frozen=True, kw_only=True)
class ParisKVBalanced(ParisKV):
    """ParisKV with codes that are fitted to the model, one-bit products and the mean softmax of a group.

    Same as `ParisKV(stage1="product", center=True, balance=True, norms=True, weight_dtype="uint8", gqa="mean_softmax")` with a
    schedule of its own: balanced keys need fewer candidates (`BALANCED_SCHEDULE`), but 8 per fetched token. It is not in the
    paper, and takes fewer bytes per token (docs/methods/balanced.md).

    The parameters are those of ParisKV: stage1, center, balance, norms, weight_dtype, gqa, schedule, min_candidates_per_k (with
    other defaults), candidate_ratio, collision_ratio, seed.
    """

    name: ClassVar[str] = "pariskv-balanced"

    stage1: str = "product"
    center: bool = True
    balance: bool = True
    norms: bool = True
    weight_dtype: str = "uint8"
    schedule: tuple[RatioStep | tuple[int | None, float, float], ...] = BALANCED_SCHEDULE
    min_candidates_per_k: int = 8
    gqa: str | None = "mean_softmax"
