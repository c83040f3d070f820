"""A random Llama with a word-level tokenizer, small enough to make anew in each test."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

WORDS = ["<unk>", "<bos>", "<eos>", "<user>", "<end>", "the", "red", "boat", "harbour", "Question", "Answer", ":", ".", "text"]
CHAT = (
    "{{ bos_token }}{% for m in messages %}<user>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<user>{% endif %}"
)


def tiny_tokenizer(chat_template: str | None = CHAT) -> Any:
    """Every word it does not know is `<unk>`; with or without a chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import Whitespace
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>"))
    backend.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="<unk>",
        bos_token="<bos>",
        eos_token="<eos>",
        additional_special_tokens=["<user>", "<end>"],
    )
    tokenizer.chat_template = chat_template
    return tokenizer


def word_tokenizer(count: int) -> Any:
    """The words w0, w1, … with their numbers as ids, for models with other vocabularies than `WORDS`; no chat template."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(WordLevel({f"w{i}": i for i in range(count)}, unk_token="w0"))
    backend.pre_tokenizer = WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="w0", eos_token="w1", pad_token="w2")


def byte_tokenizer() -> Any:
    """Every byte is a token; no special tokens and no chat template."""
    from tokenizers import Tokenizer
    from tokenizers.decoders import ByteLevel as Decoder
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel
    from transformers import PreTrainedTokenizerFast

    backend = Tokenizer(BPE({byte: i for i, byte in enumerate(sorted(ByteLevel.alphabet()))}, []))
    backend.pre_tokenizer, backend.decoder = ByteLevel(add_prefix_space=False), Decoder()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def save_tiny_model(folder: Path, *, max_tokens: int = 16384, chat_template: str | None = CHAT) -> Path:
    """Writes model and tokenizer as `save_pretrained` does; one layer, 2 query heads and 1 KV head of 64."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=len(WORDS),
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        max_position_embeddings=max_tokens,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer(chat_template).save_pretrained(folder)
    return folder
