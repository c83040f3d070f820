"""`torch.set_default_dtype` and `torch.set_default_device` of the user change no answer.

On the device "meta" a tensor has no numbers, so any that forgets its device ends the test.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import engine
from tests.backends.models import tiny
from tests.engine.users import METHODS


@pytest.fixture(params=[torch.bfloat16, torch.float64, "meta"], ids=str)
def set_default(request: pytest.FixtureRequest) -> Iterator[Any]:
    def change() -> None:
        if isinstance(request.param, str):
            torch.set_default_device(request.param)
        else:
            torch.set_default_dtype(request.param)

    dtype = torch.get_default_dtype()
    try:
        yield change
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(dtype)


def test_every_method_answers_the_same(set_default: Any, tmp_path: Path) -> None:
    model = tiny("llama")
    ids = torch.randint(3, 320, (1, 90), generator=torch.Generator().manual_seed(0))
    more = torch.cat([ids, ids[:, :9]], 1)

    def answers(folder: Path) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for name, method in METHODS.items():
            result = engine.generate(model, None, ids, method, max_new_tokens=4, chunk_tokens=40)
            cache = kvrecall.RetrievalCache(model.config, method)
            engine.prefill(model, ids, cache)
            cache.save(folder / name)
            loaded = kvrecall.RetrievalCache.load(folder / name, model.config, model=model, device="cpu")
            later = [engine.generate(model, None, more, each, max_new_tokens=3).new_tokens for each in (cache.fork(), loaded)]
            made[name] = result.new_tokens, later
        return made

    wanted = answers(tmp_path / "before")
    set_default()
    assert answers(tmp_path / "after") == wanted
