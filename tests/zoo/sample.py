"""Families that `make test` runs, and what each of them is there for; docs/design/families.md shows them as a table."""

from __future__ import annotations

from tests.zoo.tiny import AUTO, CAUSAL

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
    (CAUSAL, "gptj"): "attention of its own before transformers 5.24",
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

ADAPTERS = tuple(RETRIEVES)
"""Wrapped by PEFT, with adapters on every linear layer, these must be equal, too."""

IMAGES = {
    "llava": "image tokens between those of the text",
    "aya_vision": "the same, sliding windows",
    "cohere2_vision": "the same, sliding windows",
    "internvl": "the same, pixels shuffled into fewer tokens",
}
"""Asked with an image per prompt, these must be equal."""

IMAGES_REFUSED = {"paligemma": "the prompt is seen in both directions"}
"""Asked with an image, these must be refused."""
