"""The baselines with small parts, in one way of sharing a search each, for the invariants and their own tests."""

from __future__ import annotations

from typing import Any

from kvrecall import methods
from kvrecall.methods import Method
from tests.one_layer import ZONES

SMALL: dict[str, dict[str, Any]] = {
    "arkvale": {"page_tokens": 4},
    "freekv": {"page_tokens": 4, "threshold": 0.05},
    "h2o": {},
    "magicpig": {"bits": 4, "tables": 12, "dense_layers": ()},
    "pqcache": {"bits": 3},
    "quest": {"page_tokens": 3, "dense_layers": ()},
    "raas": {"page_tokens": 3},
    "retroinfer": {"cluster_tokens": 4, "stretch_tokens": 32},
    "shadowkv": {"page_tokens": 2, "outlier_pages": 2},
    "snapkv": {"window_tokens": 8},
    "snapkv+": {"window_tokens": 8, "refresh_interval": 6},
    "socket": {"bits": 6, "tables": 20},
    "streaming": {"top_k": 0},
    "twilight": {"page_tokens": 3, "dense_layers": (), "p": 1.0},
}
"""Parameters by name; all registered baselines are here."""

KEEPS_NOTHING = ("streaming",)
"""Whatever the budget, the retrieval zone is not attended."""
SAMPLES = ("magicpig",)
"""A search returns what chance returns, at most the budget; a sample of a zone that the budget covers is not the zone."""
CHOSEN_ONCE = ("snapkv", "snapkv+")
"""No search: the zone is attended as far as it was chosen, so tokens that arrive after the choice are not."""


def small(name: str, **changes: Any) -> Method:
    """A baseline with small zones and parts."""
    return methods.get(name, **{**ZONES, **SMALL[name], **changes})


def baselines(top_k: int) -> dict[str, Method]:
    """Every baseline with a budget of `top_k` tokens."""
    made = {name: small(name, **({} if name in KEEPS_NOTHING else {"top_k": top_k})) for name in SMALL}
    return made | {
        f"{name}-per_head": small(name, top_k=top_k, gqa="per_head") for name in ("quest", "h2o", "raas", "twilight", "socket")
    }
