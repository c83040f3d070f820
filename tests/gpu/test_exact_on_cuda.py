"""Exact answers on a GPU: captured steps draft, and a pass over rows in host memory checks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import engine
from tests.backends.models import tiny
from tests.engine.test_lookup import text
from tests.engine.users import METHODS, in_threads

pytestmark = pytest.mark.gpu


def answer(model: Any, method: kvrecall.Method | kvrecall.RetrievalCache, ids: torch.Tensor, **more: Any) -> list[list[int]]:
    """60 greedy tokens."""
    return engine.generate(model, None, ids.to(model.device), method, max_new_tokens=60, chunk_tokens=128, **more).new_tokens


@pytest.mark.parametrize("family", ["llama", "gemma2"])
@pytest.mark.parametrize("method", [name for name in METHODS if name != "full"])
def test_tokens_are_those_of_full_attention(method: str, family: str) -> None:
    model = tiny(family).cuda()
    ids = text(700)
    made = engine.generate(model, None, ids.cuda(), METHODS[method], max_new_tokens=60, chunk_tokens=128, exact=True)
    assert made.new_tokens == answer(model, kvrecall.Full(), ids)
    assert made.drafts is not None and made.drafts.checks + made.drafts.accepted == 59


def test_captured_drafts_of_several_requests() -> None:
    """Forks of a document and others, exact ones and not, and look-up."""
    model, document = tiny("llama").cuda(), text(900)
    read = kvrecall.RetrievalCache(model.config, METHODS["pariskv"])
    engine.prefill(model, document.cuda(), read)
    prompts = [torch.cat([document, text(5 + n, 30 + n)], 1) for n in range(4)]
    expected = [answer(model, kvrecall.Full(), ids) for ids in prompts]
    calls = [lambda ids=ids: answer(model, read.fork(), ids, exact=True) for ids in prompts]
    others = [lambda ids=ids: answer(model, METHODS["pariskv"], ids) for ids in prompts]
    alone = [call() for call in others]
    assert in_threads([*calls, *others]) == [*expected, *alone]
    for ids, right in zip(prompts, expected, strict=True):
        assert answer(model, read.fork(), ids, exact=True, capture=True) == right
        assert answer(model, read.fork(), ids, exact=True, prompt_lookup_num_tokens=3) == right
