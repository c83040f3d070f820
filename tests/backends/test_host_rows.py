"""Caches whose rows in host memory are in eight bits: answers, operations, sessions, and what they take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import RetrievalCache, engine
from kvrecall.backends.transformers.session import read_info
from kvrecall.cache.block_rows import BlockRows
from kvrecall.core import errors
from kvrecall.core.fp8 import as_stored
from kvrecall.methods import registry
from tests.backends.models import tiny
from tests.backends.test_sessions import PARTS, decode, feed, method_of, tokens
from tests.blocks import Device, small_blocks


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)


def cache_of(model: Any, name: str, host_rows: Any = "fp8", **options: Any) -> RetrievalCache:
    return RetrievalCache(model.config, method_of(name), observe_queries=16, host_rows=host_rows, **options)


def read(model: Any, name: str = "pariskv", count: int = 150, steps: int = 9, **options: Any) -> RetrievalCache:
    """A cache that has read a prompt and decoded a few tokens."""
    cache = cache_of(model, name, **options)
    feed(model, cache, tokens(count))
    decode(model, cache, steps, seed=1)
    return cache


def rounding(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plain rows that have been in eight bits."""
    monkeypatch.setattr(BlockRows, "stored", lambda self, rows: as_stored(rows))


def rows_of(cache: RetrievalCache) -> list[torch.Tensor]:
    """All rows of every layer."""
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    return [torch.cat([block.cpu() for block in state.store.blocks(0)], 1) for state in states]


@pytest.mark.parametrize("name", [*registry.names(), *PARTS])
def test_answers_are_those_of_plain_rows_that_were_rounded(model: Any, name: str) -> None:
    """Chunks of a prompt, steps, a second turn, a crop and a fork, under every method."""
    outs = []
    for small in (True, False):
        with pytest.MonkeyPatch.context() as patch:
            if not small:
                rounding(patch)
            cache = read(model, name, host_rows="fp8" if small else "plain")
            made = [feed(model, cache, tokens(30, seed=5))]
            cache.crop(-37)
            made += [*decode(model, cache, 12), *decode(model, cache.fork(), 3, seed=8)]
            outs.append((torch.stack(made), rows_of(cache)))
    torch.testing.assert_close(outs[0][0], outs[1][0], atol=2e-5, rtol=2e-5)
    for mine, theirs in zip(outs[0][1], outs[1][1], strict=True):
        torch.testing.assert_close(mine, theirs, atol=2e-2, rtol=2e-2)  # of later tokens, which the answers made


@pytest.mark.parametrize("name", ["pariskv-balanced", "prkv", "louiskv", "ctkvr", "full"])
def test_chunks_of_a_prompt_store_what_one_chunk_stores(model: Any, name: str) -> None:
    """Of the first layer, whose keys do not depend on what was attended to.

    The model's products of another number of tokens may round differently in the last bit of fp32. In eight bits that moves a
    number to the next one in one case of many thousands; rows that were rounded twice, or before they should be, all differ.
    """
    whole, chunks = (cache_of(model, name) for _ in range(2))
    ids = tokens(150)
    feed(model, whole, ids)
    with chunks.reading_prompt():
        for part in ids.split(47, 1):
            feed(model, chunks, part)
    one, several = rows_of(whole)[0], rows_of(chunks)[0]
    torch.testing.assert_close(several, one, atol=1e-6, rtol=1 / 8)
    assert torch.isclose(several, one, atol=1e-6, rtol=1e-6).float().mean() > 0.999


def test_forks_to_other_methods_and_zones(model: Any) -> None:
    cache = read(model, "pariskv-balanced", count=200)
    before = rows_of(cache)
    for method in (method_of("ctkvr"), method_of("prkv"), kvrecall.Exact(top_k=10, sink_tokens=2, local_tokens=6)):
        fork = cache.fork(method)
        assert fork.fp8_rows
        outs = [decode(model, each, 4, seed=4) for each in (fork.fork(), fork.fork())]
        assert torch.equal(*outs) and outs[0].isfinite().all()
    assert all(torch.equal(*pair) for pair in zip(before, rows_of(cache), strict=True))


def test_a_fork_codes_what_its_parent_has_coded(model: Any) -> None:
    """Both share the memory of codes, which depend on the rows that are read back, whoever makes them."""
    cache = read(model, "pariskv-balanced", count=200)
    state = cache.retrieval_layers[0].state
    assert state is not None and state.index is not None
    before = [part.clone() for part in state.index.codes(0).parts]
    cache.fork(registry.get("pariskv-balanced", **{**method_of("pariskv-balanced").__dict__, "top_k": 5}))
    after = state.index.codes(0).parts
    assert all(torch.equal(*pair) for pair in zip(before, after, strict=True))


def test_what_is_counted(model: Any) -> None:
    small, plain = (read(model, "pariskv", host_rows=rows) for rows in ("fp8", "plain"))
    heads, dim = small.signature.kv_heads, small.signature.head_dim
    for cache, row in ((small, 2 * (dim + 4)), (plain, 2 * dim * 4)):
        total = cache.stats().total
        zones = [layer.state.store.zones(0) for layer in cache.retrieval_layers if layer.state is not None]
        assert total.host_bytes == sum(zone.retrieval for zone in zones) * heads * row
        assert cache.host_bytes(100) == 100 * 2 * heads * row
        assert total.counters.bytes_fetched and total.counters.bytes_fetched % row == 0
    assert cache_of(model, "pariskv").host_bytes(100) == 100 * 2 * heads * 2 * (dim + 4)  # two layers


@pytest.mark.parametrize("name", ["pariskv-balanced", "prkv", "ctkvr", "louiskv", "full"])
def test_a_session_holds_the_blocks_as_they_are(model: Any, name: str, tmp_path: Path) -> None:
    cache = read(model, name, count=200)
    cache.save(tmp_path)
    other = RetrievalCache.load(tmp_path, model.config)
    assert other.host_rows == "fp8"
    assert all(torch.equal(*pair) for pair in zip(rows_of(cache), rows_of(other), strict=True))
    assert torch.equal(decode(model, cache, 12), decode(model, other, 12))
    assert read_info(tmp_path).rows == "fp8"


@pytest.mark.parametrize("rows", ["plain", "fp8"])
def test_a_session_of_plain_rows_is_loaded_in_eight_bits(model: Any, rows: Any, tmp_path: Path) -> None:
    cache = read(model, count=200, host_rows="plain")
    cache.save(tmp_path, rows=rows)
    small = RetrievalCache.load(tmp_path, model.config, host_rows="fp8")
    for mine, theirs in zip(rows_of(small), rows_of(cache), strict=True):
        sink, window = cache.method.zone_sizes().sink_tokens, 8
        assert torch.equal(mine[:, :sink], theirs[:, :sink]) and torch.equal(mine[:, -window:], theirs[:, -window:])
        assert torch.equal(mine[:, sink:100], as_stored(theirs[:, sink:100]))
    assert decode(model, small, 3).isfinite().all()


def test_a_session_in_eight_bits_is_loaded_as_plain_rows(model: Any, tmp_path: Path) -> None:
    cache = read(model, count=200)
    cache.save(tmp_path)
    plain = RetrievalCache.load(tmp_path, model.config, host_rows="plain")
    assert not plain.fp8_rows and all(torch.equal(*pair) for pair in zip(rows_of(plain), rows_of(cache), strict=True))
    torch.testing.assert_close(decode(model, plain, 1), decode(model, cache, 1), atol=2e-5, rtol=2e-5)


def test_rows_on_the_device_stay_as_they_are_until_they_move(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    cache, plain = read(model, "full"), read(model, "full", host_rows="plain", rows_on_device=False)
    states = [layer.state for layer in cache.retrieval_layers if layer.state is not None]
    assert all(state.store.on_device and not state.store.memory.fp8 for state in states)
    assert torch.equal(rows_of(cache)[0], rows_of(plain)[0])
    device.refusing = device.demands
    feed(model, cache, tokens(60, seed=5))
    assert all(state.store.memory.fp8 and not state.store.on_device for state in states)
    zones = states[0].store.zones(0)
    moved = slice(zones.sink, zones.sink + zones.retrieval - 60)
    assert torch.equal(rows_of(cache)[0][:, moved], as_stored(rows_of(plain)[0][:, moved]))


def test_a_name_that_nobody_knows_is_refused(model: Any) -> None:
    with pytest.raises(errors.ParameterError, match=r'host_rows.*"plain" or "fp8".*fp4'):
        cache_of(model, "pariskv", "fp4")


def test_plan(model: Any) -> None:
    sizes = {"context_tokens": 1000, "method": method_of("pariskv"), "dtype": torch.float16}
    plain, small = (engine.plan(model.config, **sizes, host_rows=rows) for rows in ("plain", "fp8"))
    dim = plain.head_dim
    assert small.host_bytes * 2 * dim == plain.host_bytes * (dim + 4)
    assert (small.resident_bytes, small.summary_bytes) == (plain.resident_bytes, plain.summary_bytes)
    assert small.host_bytes_per_token < plain.host_bytes_per_token and small.session_bytes < plain.session_bytes
