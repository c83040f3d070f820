"""Saved sessions: what is loaded goes on bit for bit as what was saved, whatever the method and whatever was done before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import RetrievalCache, attach
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.session import read_info
from kvrecall.cache.session_folder import read_index
from kvrecall.core.errors import SessionError
from kvrecall.methods import Method, registry
from tests.backends.models import tiny
from tests.baselines.small import SMALL
from tests.blocks import small_blocks
from tests.one_layer import ZONES

OWN: dict[str, dict[str, Any]] = {
    "ctkvr": {"list_ratio": 3, "pool_tokens": 8},
    "louiskv": {"dense_layers": (), "cluster_tokens": 4, "max_segment_tokens": 8, "stretch_tokens": 64},
    "prkv": {"page_tokens": 4, "window_tokens": 8, "refresh_interval": 6},
    "full": {"top_k": None},
}
PARTS: dict[str, dict[str, Any]] = {
    "pariskv+means": {"method": "pariskv", "estimate": "page-means:page_tokens=6"},
    "pariskv+stride": {"method": "pariskv", "trigger": "fixed-stride:steps=4"},
    "exact+prune": {"method": "exact", "prune": "top-p:p=0.9", "static": "observation-window:window_tokens=8,interval=5"},
}


def method_of(name: str) -> Method:
    """A method with small zones and parts."""
    params = {"top_k": 10, **ZONES, **SMALL.get(name, {}), **OWN.get(name, {}), **PARTS.get(name, {})}
    return registry.get(params.pop("method", name), **params)


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=2)


@pytest.fixture(autouse=True)
def blocks_of_16(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)


def tokens(count: int, sequences: int = 1, seed: int = 0) -> Tensor:
    return torch.randint(5, 300, (sequences, count), generator=torch.Generator().manual_seed(seed))


def feed(model: Any, cache: RetrievalCache, ids: Tensor, **more: Any) -> Tensor:
    """One call of the attached model; its last logits."""
    with torch.no_grad(), attach(model):
        return model(input_ids=ids, **cache_argument(cache), use_cache=True, **more).logits[:, -1]


def decode(model: Any, cache: RetrievalCache, steps: int, seed: int = 3) -> Tensor:
    """Logits of steps that feed the same tokens to every cache."""
    told = tokens(steps, max(1, cache.sequences), seed)
    return torch.stack([feed(model, cache, told[:, i : i + 1]) for i in range(steps)])


def read(model: Any, name: str = "pariskv", count: int = 150, steps: int = 9, sequences: int = 1) -> RetrievalCache:
    """A cache that has read a prompt and decoded a few tokens."""
    cache = RetrievalCache(model.config, method_of(name), observe_queries=16)
    feed(model, cache, tokens(count, sequences))
    decode(model, cache, steps, seed=1)
    return cache


def assert_goes_on(model: Any, cache: RetrievalCache, folder: Path, config: Any = None) -> RetrievalCache:
    """Saves, loads, and has both decode, read a second turn, be cropped and decode again."""
    cache.save(folder)
    other = RetrievalCache.load(folder, config or model.config)
    assert torch.equal(decode(model, cache, 12), decode(model, other, 12))
    return other


def test_a_static_set_may_wait_for_its_step(model: Any, tmp_path: Path) -> None:
    """As captured decoding leaves it if the step that it was chosen for is not made."""
    cache = read(model, "prkv")
    for layer in cache.retrieval_layers:
        assert layer.state is not None and layer.state.static[0] is not None
        layer.state.statics.grow_older(0, -1 - layer.state.static[0].age)
    assert_goes_on(model, cache, tmp_path / "s")


@pytest.mark.parametrize("name", [*registry.names(), *PARTS])
def test_a_loaded_session_decodes_as_the_saved_one(model: Any, name: str, tmp_path: Path) -> None:
    cache = read(model, name)
    other = assert_goes_on(model, cache, tmp_path / "s")
    for each in (cache, other):
        feed(model, each, tokens(30, seed=5))
        each.crop(-7)
    assert torch.equal(decode(model, cache, 6), decode(model, other, 6))
    assert other.tokens.ids() is not None and torch.equal(other.tokens.ids(), cache.tokens.ids())  # type: ignore[arg-type]


def test_ragged_sequences_forks_and_crops_are_saved(model: Any, tmp_path: Path) -> None:
    cache = RetrievalCache(model.config, method_of("pariskv-balanced"))
    mask = torch.ones(3, 130, dtype=torch.long)
    mask[0, :60] = mask[2, :17] = 0
    feed(model, cache, tokens(130, 3), attention_mask=mask)
    cache.batch_repeat_interleave(2)
    fork = cache.fork(method_of("prkv"))
    whole = torch.cat([mask.repeat_interleave(2, 0), torch.ones(6, 40, dtype=torch.long)], 1)

    def steps(each: RetrievalCache, count: int, at: int) -> Tensor:
        told = tokens(40, 6, seed=2)
        return torch.stack(
            [feed(model, each, told[:, i : i + 1], attention_mask=whole[:, : 130 + i + 1]) for i in range(at, at + count)]
        )

    for number, each in enumerate((cache, fork)):
        steps(each, 20, 0)
        each.crop(-5)
        each.save(tmp_path / f"{number}")
        other = RetrievalCache.load(tmp_path / f"{number}", model.config)
        assert torch.equal(steps(each, 10, 15), steps(other, 10, 15))


@pytest.mark.parametrize("family", ["gemma3", "cohere2"])
def test_sliding_window_layers_are_saved(family: str, tmp_path: Path) -> None:
    model = tiny(family)
    assert_goes_on(model, read(model, count=90), tmp_path)


def test_a_session_is_described_without_loading_it(model: Any, tmp_path: Path) -> None:
    cache = read(model)
    saved, found = cache.save(tmp_path), read_info(tmp_path)
    assert (found.tokens, found.sequences, found.model, found.method) == (159, 1, "llama", "pariskv")
    assert found.settings["top_k"] == 10 and found.nbytes == saved.nbytes
    assert found.nbytes == sum(path.stat().st_size for path in (tmp_path / "data").iterdir())
    assert found.ids is not None and torch.equal(found.ids, cache.tokens.ids())  # type: ignore[arg-type]


def test_a_session_keeps_its_schedule(model: Any, tmp_path: Path) -> None:
    """A schedule that is not the method's default is a setting like any other."""
    own = kvrecall.ParisKVBalanced(top_k=10, schedule=((100, 0.9, 0.9), (None, 0.4, 0.4)), **ZONES)
    cache = RetrievalCache(model.config, own)
    feed(model, cache, tokens(150))
    other = assert_goes_on(model, cache, tmp_path)
    assert other.method == own and other.method != method_of("pariskv-balanced")


def test_what_has_not_changed_is_not_written_again(model: Any, tmp_path: Path) -> None:
    cache = read(model, count=900)
    cache.save(tmp_path)
    first = {path.name: path.stat() for path in (tmp_path / "data").iterdir()}
    other = RetrievalCache.load(tmp_path, model.config)
    feed(model, other, tokens(60, seed=9))
    other.crop(-3)
    other.save(tmp_path)
    new = [path for path in (tmp_path / "data").iterdir() if path.name not in first]
    assert len(new) == 3 and sum(path.stat().st_blocks for path in new) < sum(about.st_blocks for about in first.values()) / 3
    kept = [name for name in first if "cache" not in name]
    assert all((tmp_path / "data" / name).stat().st_mtime_ns == first[name].st_mtime_ns for name in kept)
    again = RetrievalCache.load(tmp_path, model.config)
    assert torch.equal(decode(model, other, 12), decode(model, again, 12))


def test_many_small_saves_do_not_pile_up(model: Any, tmp_path: Path) -> None:
    cache = read(model)
    for turn in range(40):
        feed(model, cache, tokens(20, seed=turn))
        cache.save(tmp_path)
    assert len(list((tmp_path / "data").iterdir())) <= 2 * 18 + 1
    assert torch.equal(decode(model, cache, 5), decode(model, RetrievalCache.load(tmp_path, model.config), 5))


def test_the_saved_session_stays_when_a_loaded_one_changes(model: Any, tmp_path: Path) -> None:
    read(model).save(tmp_path)
    first = RetrievalCache.load(tmp_path, model.config)
    expected = decode(model, RetrievalCache.load(tmp_path, model.config), 30)
    for _ in range(3):
        feed(model, first, tokens(40, seed=11))
    assert torch.equal(decode(model, RetrievalCache.load(tmp_path, model.config), 30), expected)


def refused(folder: Path, config: Any, match: str, **more: Any) -> None:
    with pytest.raises(SessionError, match=match):
        RetrievalCache.load(folder, config, **more)


def test_what_does_not_fit_is_refused_by_name(model: Any, tmp_path: Path) -> None:
    read(model).save(tmp_path / "s")
    refused(tmp_path / "none", model.config, "the index of a saved session, got No such file")
    refused(tmp_path / "s", tiny("llama", num_hidden_layers=3).config, "model: expected .* 2 layers, .*, got llama, 3 layers")
    refused(tmp_path / "s", tiny("llama", num_hidden_layers=2, vocab_size=321).config, "config: expected the model")
    other = tiny("llama", num_hidden_layers=2)
    other.model.layers[1].mlp.up_proj.weight.data *= 2
    refused(tmp_path / "s", model.config, "model: expected the model that it was saved with .weights", model=other)
    late = RetrievalCache.load(tmp_path / "s", model.config)
    with pytest.raises(SessionError, match="weights"):
        feed(other, late, tokens(1))
    assert late.get_seq_length() == 159 and decode(model, late, 2).isfinite().all()
    half = tiny("llama", num_hidden_layers=2).half()
    refused(tmp_path / "s", model.config, "dtype: expected a model in float32, got float16", model=half)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "letter.txt").write_text("dear")
    with pytest.raises(SessionError, match=r"an empty folder or a saved session, got other files .letter.txt"):
        read(model).save(tmp_path / "mine")
    with pytest.raises(SessionError, match="one that holds tokens"):
        RetrievalCache(model.config, kvrecall.ParisKV()).save(tmp_path / "empty")


def rewritten(folder: Path, change: Any) -> None:
    """Changes the index and gives it the checksum that it must have."""
    import hashlib

    path = folder / "session.json"
    held = json.loads(path.read_text())
    del held["checksum"]
    change(held)
    body = json.dumps(held)[1:] + "\n"
    path.write_text(f'{{"checksum": "{hashlib.sha256(body.encode()).hexdigest()}", {body}')


def test_a_newer_version_is_refused(model: Any, tmp_path: Path) -> None:
    read(model).save(tmp_path)
    rewritten(tmp_path, lambda held: held.update(version=2))
    refused(tmp_path, model.config, "expected version 1, got version 2. Use a newer kvrecall")


def test_a_session_may_have_a_former_name_of_a_setting(model: Any, tmp_path: Path) -> None:
    """`estimate` was `rest`: people have sessions with it."""
    cache = read(model, "pariskv+means")
    cache.save(tmp_path)
    assert "estimate" in read_info(tmp_path).settings
    rewritten(tmp_path, lambda held: held["settings"].update(rest=held["settings"].pop("estimate")))
    assert set(read_info(tmp_path).settings) >= {"rest", "top_k"}
    other = RetrievalCache.load(tmp_path, model.config)
    assert other.method == cache.method and torch.equal(decode(model, cache, 3), decode(model, other, 3))
    rewritten(tmp_path, lambda held: held["settings"].update(estimate=held["settings"]["rest"]))
    refused(tmp_path, model.config, "estimate and rest")


def test_an_index_is_read_back_as_it_was_written(model: Any, tmp_path: Path) -> None:
    read(model).save(tmp_path)
    before, _ = read_index(tmp_path)
    rewritten(tmp_path, lambda held: None)
    assert read_index(tmp_path)[0] == before


def test_compact_rows_are_near_and_small_and_the_rest_is_exact(model: Any, tmp_path: Path) -> None:
    cache = read(model, count=900)
    plain, small = cache.save(tmp_path / "plain"), cache.fork().save(tmp_path / "small", rows="fp8")
    assert small.rows == "fp8" and small.nbytes < 0.6 * plain.nbytes
    loaded = RetrievalCache.load(tmp_path / "small", model.config)
    for own, other in zip(cache.retrieval_layers, loaded.retrieval_layers, strict=True):
        assert own.state is not None and other.state is not None
        assert torch.equal(own.state.store.resident.view(0), other.state.store.resident.view(0))
        mine, theirs = (torch.cat(list(each.state.store.host[0].blocks()), 1) for each in (own, other))  # type: ignore[union-attr]
        assert ((mine - theirs).abs().amax(-1) <= mine.abs().amax(-1) / 16).all() and not torch.equal(mine, theirs)
    assert decode(model, loaded, 3).isfinite().all()
    loaded.save(tmp_path / "small")
    assert read_info(tmp_path / "small").rows == "plain"
    with pytest.raises(kvrecall.errors.ParameterError, match="fp8"):
        cache.save(tmp_path / "other", rows="fp4")  # type: ignore[arg-type]
    with pytest.raises(kvrecall.errors.ParameterError, match="without rows would have to read its documents again"):
        cache.save(tmp_path / "other", rows="none")  # type: ignore[arg-type]
    assert not (tmp_path / "other").exists()
