"""The rules for combining parts. Every refusal has a reason; `scripts/composition_table.py` prints all pairs."""

from __future__ import annotations

from importlib.util import find_spec
from typing import TYPE_CHECKING

from kvrecall.core.errors import CompositionError, ParameterError
from kvrecall.parts import names

if TYPE_CHECKING:
    from kvrecall.methods.base import Method

PLACES = ("device", "host")


def check(method: Method) -> None:
    """Raises ParameterError or CompositionError for parts that do not fit together."""
    label = type(method).__name__
    if method.attend not in (None, *PLACES):
        raise ParameterError("attend", "device or host", method.attend, "host attends on the CPU, where the rows lie.")
    if method.index is not None and method.own_index() is not None:
        raise CompositionError(f"{label}(index={method.index})", f"{label} is its index", "Use kvrecall.Method(index=…).")
    for part in (method.trigger_config, method.static_config, method.prune_config, method.fetch_config):
        part()  # raises for impossible hyper-parameters
    index = method.index_config()
    if index is None:
        _without_index(method, label)
        return
    if method.top_k is None:
        raise ParameterError("top_k", "an integer > 0", None, "Use kvrecall.Full() to attend to everything.")
    _with_index(method)


def _without_index(method: Method, label: str) -> None:
    if label == "Method":
        raise ParameterError("index", f"one of {', '.join(names('index'))}", None, "Use kvrecall.Full() to search nothing.")
    for role in ("trigger", "static", "gqa", "prune", "rest", "fetch", "attend"):
        if getattr(method, role) is not None:
            raise CompositionError(
                f"{label}({role}={getattr(method, role)})",
                "nothing is ever searched or fetched",
                "Choose a method that retrieves.",
            )


def _with_index(method: Method) -> None:
    index = method.index_config()
    assert index is not None
    if method.attends_on_host:
        if method.fetch is not None:
            raise CompositionError(
                f"attend=host with fetch={method.fetch}",
                "the rows stay where they lie, nothing is fetched",
                "Leave one of them out.",
            )
        if index.weighs:
            raise CompositionError(
                f"index={index} with attend=host", "weights of sampled tokens have no CPU kernel", 'Use attend="device".'
            )
        if find_spec("numba") is None:
            raise CompositionError("attend=host", "attention on the CPU is compiled by numba", "pip install numba.")
    prune = method.prune_config()
    if prune is not None and index.weighs:
        raise CompositionError(
            f"index={index} with prune={prune}", "sampled tokens stand for those that were not", "Leave one of them out."
        )
    rest = method.rest_config()
    if rest is not None and (index.weighs or index.estimates):
        why = "it estimates what it leaves out itself" if index.estimates else "sampled tokens stand for those that were not"
        raise CompositionError(f"index={index} with rest={rest}", why, "Leave one of them out.")
    static = method.static_config()
    if static is not None and index.static_refusal:
        raise CompositionError(f"index={index} with static={static}", index.static_refusal, "Leave the static set out.")
    longest = max(index.segment_lengths or (0,))
    if method.update_interval < longest:
        raise CompositionError(
            f"index={index} with update_interval={method.update_interval}",
            f"whole segments of up to {longest} tokens leave the window, more than its buffer holds",
            "Raise update_interval or lower max_segment_tokens.",
        )
