"""The example of a method of one's own: registered by one line, it does what every method does."""

from __future__ import annotations

import pytest
import torch

import kvrecall
from examples.rounded_keys import RoundedConfig, RoundedKeys
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.core.errors import ParameterError
from kvrecall.core.structs import Budget
from kvrecall.index.base import LayerShape
from kvrecall.methods import registry
from kvrecall.step.settings import Settings, served
from tests.backends.models import tiny
from tests.layers import DIM, ZONES


@pytest.fixture
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_METHODS", dict(registry._METHODS))
    kvrecall.methods.register("rounded-keys", "examples.rounded_keys", "RoundedKeys")


@pytest.mark.usefixtures("registered")
def test_one_line_registers_it() -> None:
    method = kvrecall.methods.get("rounded-keys", top_k=7)
    assert method == RoundedKeys(top_k=7) and registry.name_of(method) == "rounded-keys"
    assert kvrecall.methods.RoundedKeys is RoundedKeys and "rounded-keys" in kvrecall.methods.names()
    kvrecall.methods.register("rounded-keys", "examples.rounded_keys", "RoundedKeys")  # once more changes nothing


@pytest.mark.parametrize(("name", "attribute"), [("pariskv", "RoundedKeys"), ("Rounded", "RoundedKeys")])
def test_other_names_are_refused(name: str, attribute: str) -> None:
    before = kvrecall.methods.names()
    with pytest.raises(ParameterError, match="lower case that no other method has"):
        kvrecall.methods.register(name, "examples.rounded_keys", attribute)
    assert kvrecall.methods.names() == before


def test_a_search_finds_the_best_rounded_keys() -> None:
    keys, queries = torch.randn(2, 50, DIM), torch.randn(1, 4, DIM)
    config = RoundedConfig(gqa="max")
    index = config.build(LayerShape(1, 4, 2, DIM, torch.float32, torch.device("cpu")))
    index.append(0, keys[:, :31])
    index.append(0, keys[:, 31:])
    found = index.search(queries, Budget(5, DIM**-0.5), [0]).ids[0]
    best = config.scores(queries.view(2, 2, DIM), config.summaries(keys)).amax(1).topk(5).indices.sort().values
    assert torch.equal(found, best.int())
    codes, scale = config.summaries(keys)
    errors = (keys - codes * scale).abs().amax(-1) / keys.abs().amax(-1)
    assert float(errors.max()) <= 0.5 / 127 + 1e-6


@pytest.mark.usefixtures("registered")
def test_a_budget_that_covers_the_zone_is_full_attention() -> None:
    model = tiny("llama")
    ids = torch.randint(0, 64, (2, 90), generator=torch.Generator().manual_seed(1))
    full = model.generate(ids, max_new_tokens=12, do_sample=False)
    method = kvrecall.methods.get(
        "rounded-keys", top_k=200, full_attention_threshold=0, **{k: v for k, v in ZONES.items() if "threshold" not in k}
    )
    cache = kvrecall.RetrievalCache(model.config, method)
    with kvrecall.attach(model):
        answer = model.generate(ids, max_new_tokens=12, do_sample=False, **cache_argument(cache))
    assert torch.equal(answer, full)


@pytest.mark.usefixtures("registered")
def test_an_engine_with_pages_of_its_own_finds_what_a_cache_finds() -> None:
    """Served under vLLM, in blocks that hold other sequences, too."""
    assert "rounded-keys" in served() and Settings.of({"kvrecall": {"method": "rounded-keys"}}).method.name == "rounded-keys"
    config, size, sinks = RoundedConfig(gqa="max"), 16, 3
    shape = LayerShape(1, 4, 2, DIM, torch.float32, torch.device("cpu"))
    pages = torch.full((9, config.paged_bytes(shape, size)), 255, dtype=torch.uint8)
    paged, tables = config.paged(shape, size), [[4, 1, 7], [2, 8, 3]]
    paged.bind(pages, torch.empty(9, 2, size, 2, DIM))
    texts = [torch.randn(2, 40, DIM) for _ in tables]
    for keys, table in zip(texts, tables, strict=True):
        for start, stop in ((0, 25), (25, 26), (26, 40)):
            slots = torch.tensor([table[p // size] * size + p % size for p in range(start, stop)])
            paged.store(keys[:, start:stop], start, slots)
    queries, ends = torch.randn(2, 4, DIM), [40, 33]
    found = paged.search(queries, tables, ends, sinks, Budget(5, DIM**-0.5))
    for b, keys in enumerate(texts):
        index = config.build(shape)
        index.append(0, keys[:, sinks : ends[b]])
        expected = index.search(queries[b : b + 1], Budget(5, DIM**-0.5), [0]).ids[0]
        assert torch.equal(found.ids[b], expected + sinks)
