"""Statistics of keys: gathered from the first prompt, kept for the process, shared by forks."""

from __future__ import annotations

import gc
import warnings
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall.backends.transformers import RetrievalCache, attach
from kvrecall.backends.transformers import calibration as module
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.calibration import LEAST_TOKENS, calibration_of, fresh
from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.engine.prefill import prefill
from kvrecall.index.calibration import KeyStatistics, LayerCalibration, NoRotary
from tests.backends.models import tiny

ZONES: dict[str, Any] = {"sink_tokens": 4, "local_tokens": 32, "update_interval": 16, "full_attention_threshold": 0}


def balanced(**settings: Any) -> Any:
    return kvrecall.methods.get("pariskv-balanced", top_k=16, **ZONES, **settings)


def ids_of(tokens: int, seed: int = 0, batch: int = 1) -> Tensor:
    return torch.randint(3, 300, (batch, tokens), generator=torch.Generator().manual_seed(seed))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No file of the user's is found."""
    monkeypatch.setenv("KVRECALL_MODELS", str(tmp_path / "models"))
    return tmp_path / "calibration"


@pytest.fixture
def model() -> Any:
    return tiny("llama")


def read(model: Any, ids: Tensor, method: Any = None, chunk_tokens: int = 2048, **options: Any) -> RetrievalCache:
    cache = RetrievalCache(model.config, method or balanced(), **options)
    prefill(model, ids, cache, chunk_tokens=chunk_tokens)
    return cache


def gathered(model: Any, ids: Tensor, chunk_tokens: int = 2048, **options: Any) -> dict[int, KeyStatistics]:
    """Statistics of a whole prompt: under full attention no index settles them at its first keys."""
    cache = RetrievalCache(model.config, kvrecall.Full(), observe_queries=1)
    prefill(model, ids, cache, chunk_tokens=chunk_tokens, **options)
    return settle(cache)


def settle(cache: RetrievalCache) -> dict[int, KeyStatistics]:
    """What indexes do at their first keys."""
    assert cache.calibration is not None
    return cache.calibration.settle()


def step(model: Any, cache: RetrievalCache, sequences: int = 1) -> None:
    with attach(model), torch.inference_mode():
        model(input_ids=torch.full((sequences, 1), 7), **cache_argument(cache), use_cache=True)


def same(one: KeyStatistics, other: KeyStatistics, rtol: float = 0.0) -> None:
    assert one.tokens == other.tokens
    for name in ("key_mean", "key_covariance", "query_second"):
        torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=rtol, atol=rtol * 1e-3)


@pytest.mark.filterwarnings("ignore:llama")
def test_the_first_long_prompt_is_kept_and_the_next_cache_gets_it(model: Any) -> None:
    first = read(model, ids_of(LEAST_TOKENS))
    kept = first.calibration
    assert kept is not None and kept.tokens == LEAST_TOKENS
    settle(first)
    step(model, first)
    assert calibration_of(model) is kept
    second = read(model, ids_of(300, seed=1))
    assert second.calibration is kept and kept.tokens == LEAST_TOKENS
    assert second.layers[2].state.shape.calibration is kept.layers[2]


@pytest.mark.filterwarnings("ignore:llama")
def test_a_short_prompt_serves_its_own_cache_and_forks(model: Any) -> None:
    cache = read(model, ids_of(LEAST_TOKENS - 1))
    own = cache.calibration
    settle(cache)
    step(model, cache)
    assert own is not None and own.tokens == LEAST_TOKENS - 1 and own.settled
    assert cache.fork().calibration is own and calibration_of(model) is not own
    other = read(model, ids_of(1200, seed=1))
    assert other.calibration is not own
    settle(other)
    step(model, other)
    assert calibration_of(model) is other.calibration
    assert cache.calibration is own


@pytest.mark.filterwarnings("ignore:llama")
def test_an_index_settles_them_with_its_first_keys(model: Any) -> None:
    """Of the chunk whose keys are coded first, and of all that came before."""
    cache = read(model, ids_of(300), chunk_tokens=16)
    assert cache.calibration is not None and cache.calibration.settled and cache.calibration.tokens == 48
    assert settle(cache)[1].tokens == 48


@pytest.mark.filterwarnings("ignore:llama")
def test_layers_without_an_index_are_kept_with_the_others(model: Any) -> None:
    cache = read(model, ids_of(1200), balanced(dense_layers=(0, 1)))
    assert cache.calibration is not None
    cache.calibration.layers[2].settle(2, 64)
    step(model, cache)
    assert calibration_of(model) is cache.calibration and cache.calibration.settled


def test_told_once(model: Any) -> None:
    with pytest.warns(UserWarning, match="llama: no statistics of its keys are known; they come from the first prompt"):
        read(model, ids_of(40))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        read(model, ids_of(40))


def test_methods_that_need_none_ask_for_none(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "rotaries_of", lambda model: pytest.fail("asked"))
    assert read(model, ids_of(100), kvrecall.ParisKV(top_k=8, **ZONES)).calibration is None


@pytest.mark.filterwarnings("ignore:llama")
def test_statistics_are_those_of_the_keys_before_the_embedding(model: Any) -> None:
    """Of layer 0, whose keys follow from the embeddings of the tokens."""
    ids = ids_of(1100)
    found = gathered(model, ids)[0]
    layer = model.model.layers[0]
    with torch.no_grad():
        hidden = layer.input_layernorm(model.model.embed_tokens(ids))
        keys = layer.self_attn.k_proj(hidden)[0].unflatten(1, (2, 64)).transpose(0, 1).double()
        queries = layer.self_attn.q_proj(hidden)[0].unflatten(1, (2, 2, 64)).permute(1, 0, 2, 3).flatten(1, 2).double()
    apart = keys - keys.mean(1, keepdim=True)
    same(found, KeyStatistics(1100, keys.mean(1), apart.mT @ apart / 1100, queries.mT @ queries / 2200), rtol=1e-3)


@pytest.mark.filterwarnings("ignore:llama")
def test_chunks_make_no_difference(model: Any) -> None:
    ids = ids_of(1300)
    found = [gathered(model, ids, chunk) for chunk in (1300, 256, 77)]
    assert found[0][0].tokens == 1300
    for other in found[1:]:
        for number, statistics in found[0].items():
            same(statistics, other[number], rtol=2e-3)  # the model's own rounding


@pytest.mark.filterwarnings("ignore:llama")
def test_padding_is_not_gathered(model: Any) -> None:
    """Two sequences, one padded on the left: the same as each alone."""
    one, two = ids_of(200, seed=1), ids_of(120, seed=2)
    batch = torch.cat([one, torch.cat([torch.zeros(1, 80, dtype=torch.long), two], 1)])
    mask = torch.ones_like(batch)
    mask[1, :80] = 0
    together = gathered(model, batch, 64, attention_mask=mask)
    alone = [gathered(model, ids) for ids in (one, two)]
    for number, found in together.items():
        a, b = alone[0][number], alone[1][number]
        means = [(200 * x + 120 * y) / 320 for x, y in ((a.key_mean, b.key_mean), (a.key_second, b.key_second))]
        query = (200 * a.query_second + 120 * b.query_second) / 320
        same(found, KeyStatistics(320, means[0], means[1] - means[0].unsqueeze(-1) * means[0].unsqueeze(-2), query), rtol=2e-3)


@pytest.mark.filterwarnings("ignore:llama")
def test_a_first_chunk_of_one_token(model: Any) -> None:
    cache = read(model, ids_of(1))
    assert cache.calibration is not None and cache.calibration.tokens == 1
    step(model, cache)
    assert cache.calibration.tokens == 2
    assert all(bool(s.key_covariance.isfinite().all()) for s in settle(cache).values())


def test_no_tokens_are_no_statistics() -> None:
    calibration = LayerCalibration(NoRotary(64))
    calibration.see(torch.zeros(2, 0, 64), torch.zeros(4, 0, 64), 0)
    assert calibration.settle(2, 64).tokens == 0


def test_keys_that_are_not_finite_are_no_statistics() -> None:
    calibration = LayerCalibration(NoRotary(64))
    calibration.see(torch.full((2, 3, 64), float("nan")), torch.zeros(4, 3, 64), 0)
    assert calibration.settle(2, 64).tokens == 0


@pytest.mark.filterwarnings("ignore")
def test_a_model_without_rotary_embedding() -> None:
    import transformers

    config = transformers.GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=320, n_positions=256)
    model = transformers.GPT2LMHeadModel(config).eval()
    cache = read(model, ids_of(100))
    assert cache.calibration is not None and cache.calibration.tokens == 100
    assert all(layer.rotary.turns_nothing for layer in cache.calibration.layers.values())


@pytest.mark.filterwarnings("ignore:llama")
def test_a_pass_that_is_undone_is_not_gathered(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = read(model, ids_of(100))
    assert cache.calibration is not None
    before = cache.calibration.layers[0].mark()

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(model.model.layers[2], "forward", broken)
    with attach(model), torch.inference_mode(), pytest.raises(RuntimeError, match="no"):
        model(input_ids=ids_of(20), **cache_argument(cache), use_cache=True)
    assert cache.calibration.layers[0].mark() == before and cache.get_seq_length() == 100


def test_an_error_while_the_model_is_asked_changes_nothing(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError

    cache = RetrievalCache(model.config, balanced())
    with monkeypatch.context() as patch:
        patch.setattr(model.model.layers[2], "forward", full)
        with attach(model), torch.inference_mode(), pytest.raises(torch.OutOfMemoryError):
            model(input_ids=ids_of(20), **cache_argument(cache), use_cache=True)
    assert cache.calibration is None and cache.running is None and cache.get_seq_length() == 0
    assert model.config._attn_implementation != "kvrecall"
    with pytest.warns(UserWarning, match="no statistics"):
        prefill(model, ids_of(20), cache)
    assert cache.calibration is not None and cache.calibration.tokens == 20


@pytest.mark.filterwarnings("ignore:llama")
@pytest.mark.parametrize("local_tokens", [32, 48], ids=["same zones", "other zones"])
def test_a_fork_under_a_method_that_needs_statistics(model: Any, local_tokens: int) -> None:
    """They are those of its prompt where that was expected, else what the process knows, else none."""
    other = kvrecall.methods.get("pariskv-balanced", top_k=16, **ZONES | {"local_tokens": local_tokens})
    full = kvrecall.methods.get("full", **ZONES)
    watched = read(model, ids_of(1200), full, observe_queries=64)
    assert watched.calibration is not None
    assert watched.fork(other).layers[1].state.shape.calibration is watched.calibration.layers[1]
    plain = read(model, ids_of(1200), full)
    assert plain.calibration is None and plain.fork(other).calibration is None
    settle(watched)
    step(model, watched)
    fork = plain.fork(other)
    assert fork.calibration is watched.calibration
    assert fork.layers[1].state.shape.calibration is watched.calibration.layers[1]


@pytest.mark.filterwarnings("ignore:llama")
def test_a_reset_cache_asks_anew(model: Any) -> None:
    cache = read(model, ids_of(300))
    before = cache.calibration
    cache.reset()
    prefill(model, ids_of(50), cache)
    assert cache.calibration is not before and cache.calibration is not None and cache.calibration.tokens == 50


@pytest.mark.filterwarnings("ignore:llama")
def test_a_model_is_not_kept_alive() -> None:
    model = tiny("llama")
    rotaries_of(model)
    module.keep(model, fresh(model))
    gone = ref(model)
    del model
    gc.collect()
    assert gone() is None
