"""A fixed sample of the zoo: every mechanism once, in seconds. `make test-zoo` runs all families."""

from __future__ import annotations

import pytest

from tests.zoo.compare import EQUAL, REFUSED, compare
from tests.zoo.tiny import AUTO, CAUSAL, family

_, SEQ2SEQ, IMAGE_TEXT = AUTO

RETRIEVES = {
    "llama": "GQA",
    "llama[no GQA]": "a KV head for every query head",
    "gpt_bigcode": "MQA",
    "gpt2": "learned positions, fused projections",
    "opt": "positions that count padding",
    "olmo2": "norms behind attention, no biases",
    "qwen3_moe": "experts",
    "gemma2": "softcap, sliding windows",
    "gemma3_text": "sliding windows with another rope",
    "gpt_oss": "attention sinks",
    "qwen3_next": "linear attention beside full attention",
    "jamba": "mamba layers",
    "lfm2": "short convolutions",
}
"""These must be equal: a refusal would be a loss."""

EQUAL_OR_REFUSED = {
    (CAUSAL, "deepseek_v3"): "latent attention: keys are made from what the cache holds",
    (CAUSAL, "bloom"): "ALiBi, attention of its own",
    (CAUSAL, "falcon"): "attention of its own",
    (CAUSAL, "gptj"): "attention of its own",
    (CAUSAL, "jetmoe"): "keys repeated behind the cache",
    (CAUSAL, "diffllama"): "two attentions over one key",
    (CAUSAL, "gemma3n_text"): "layers that share keys of earlier ones",
    (CAUSAL, "inkling2_text"): "a position bias as an argument",
    (CAUSAL, "doge"): "a mask made from values",
    (CAUSAL, "mamba"): "no attention at all",
    (SEQ2SEQ, "t5"): "encoder and decoder, position bias",
    (IMAGE_TEXT, "llava"): "a vision tower beside the decoder",
}
"""These may be either, but nothing else: a wrong answer or a raw error is a fault."""


def test_the_sample_has_25_families() -> None:
    assert len(RETRIEVES) + len(EQUAL_OR_REFUSED) == 25


@pytest.mark.parametrize("name", RETRIEVES)
def test_equal(name: str) -> None:
    found = compare(family(name))
    assert (found.outcome, found.message, found.faults) == (EQUAL, "", [])


@pytest.mark.parametrize(("mapping", "name"), EQUAL_OR_REFUSED, ids=[name for _, name in EQUAL_OR_REFUSED])
def test_equal_or_refused(mapping: str, name: str) -> None:
    found = compare(family(name, mapping))
    assert found.outcome in (EQUAL, REFUSED), found.message
    assert not found.faults
