"""docs/guide/several_users.md: its examples run, one after another."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from tests.backends.models import tiny
from tests.tiny import WORDS, tiny_tokenizer

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "several_users.md"


def test_the_examples_of_the_page_run() -> None:
    model = tiny("llama", vocab_size=len(WORDS))
    names: dict[str, Any] = {"model": model, "tokenizer": tiny_tokenizer()}
    blocks = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.S)
    assert len(blocks) == 4
    for block in blocks:
        exec(block, names)
    assert len(names["answers"]) == 3
    assert names["guessed"].new_tokens == names["result"].new_tokens
    assert names["streams"][0] == names["result"].new_tokens[0] and len(names["streams"][1]) > 0
