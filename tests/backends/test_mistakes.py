"""Every mistake gets an error that names the value, what was expected and the remedy, and loses nothing."""

from __future__ import annotations

import copy
import io
import multiprocessing.reduction
import os
import pickle
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PretrainedConfig

import kvrecall
from kvrecall import engine, errors, methods
from kvrecall.backends.transformers.cache_name import cache_argument
from tests.backends.models import tiny
from tests.one_layer import ZONES

COVERING = kvrecall.ParisKV(top_k=10_000, **ZONES)


def ids(tokens: int = 111, batch: int = 1) -> torch.Tensor:
    return torch.randint(3, 320, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def greedy(model: Any, cache: Any, prompt: torch.Tensor, new_tokens: int = 20) -> torch.Tensor:
    mask = torch.ones_like(prompt)
    return model.generate(
        prompt, attention_mask=mask, **cache_argument(cache), max_new_tokens=new_tokens, do_sample=False, pad_token_id=0
    )


def still_right(model: Any, cache: Any, prompt: torch.Tensor) -> None:
    """The cache goes on as if nothing had happened."""
    with kvrecall.attach(model):
        out = greedy(model, cache, prompt)
    assert torch.equal(out, greedy(model, DynamicCache(config=model.config), prompt))


@pytest.mark.parametrize(
    ("name", "given", "says"),
    [
        ("pariskv", {"top_k": 0}, "top_k: expected an integer > 0, got 0"),
        ("pariskv", {"top_k": -3}, "got -3"),
        ("pariskv", {"top_k": None}, "kvrecall.Full"),
        ("pariskv", {"candidate_ratio": 0.0}, r"candidate_ratio: expected a ratio in \(0, 1\], got 0.0"),
        ("pariskv", {"collision_ratio": 1.5}, r"collision_ratio: expected a ratio in \(0, 1\], got 1.5"),
        ("pariskv", {"gqa": "avg"}, "unknown gqa mode 'avg'.*mean_q"),
        ("pariskv", {"weight_dtype": "int8"}, "bfloat16"),
        ("pariskv", {"local_tokens": 0}, "local_tokens: expected an integer >= 1, got 0"),
        ("pariskv", {"sink_tokens": -1}, "sink_tokens"),
        ("pariskv", {"update_interval": 0}, "update_interval"),
        ("pariskv", {"full_attention_threshold": -1}, "full_attention_threshold"),
        ("pariskv", {"topk": 5}, "unknown parameter of pariskv 'topk'.*Did you mean 'top_k'"),
        ("pariskvv", {}, "unknown method 'pariskvv'.*Did you mean 'pariskv'"),
        ("exact", {"gqa": "sum"}, "unknown gqa mode"),
        ("full", {"top_k": 5}, "Full attends to everything"),
    ],
)
def test_parameters(name: str, given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        methods.get(name, **given)
    assert isinstance(caught.value, errors.KVRecallError)


@pytest.fixture(scope="module")
def cache() -> Any:
    """Two sequences of a model with two layers; nobody changes it."""
    model = tiny("llama")
    held = kvrecall.RetrievalCache(model.config, COVERING)
    with torch.no_grad(), kvrecall.attach(model):
        model(ids(40, 2), **cache_argument(held))
    return held


def test_pickle_points_to_saving_and_forks(cache: Any) -> None:
    """Also for what holds a cache; copies are forks."""
    held = engine.GenerateResult(ids(), [[1]], None, 0.0, 0.0, cache)
    for given in (cache, [cache], cache.layers[0], held, kvrecall.RetrievalCache(tiny("llama").config, COVERING)):
        uses = (pickle.dumps, lambda it: torch.save(it, io.BytesIO()), multiprocessing.reduction.ForkingPickler.dumps)
        for use in uses:
            with pytest.raises(errors.ParameterError, match=r"got 'pickle'. Save it by cache.save\(folder\).*cache.fork\(\)"):
                use(given)
    for copied in (copy.copy(cache), copy.deepcopy(cache), copy.deepcopy([cache])[0]):
        assert copied is not cache and copied.tables is not cache.tables and copied.get_seq_length() == 40
    assert [pickle.loads(pickle.dumps(each)) for each in (COVERING, cache.tokens.ids()[0, 0])] == [
        COVERING,
        cache.tokens.ids()[0, 0],
    ]


def test_a_copy_and_its_original_go_on_by_themselves() -> None:
    model, prompt = tiny("llama"), ids()
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    engine.prefill(model, prompt[:, :-1], cache)
    copied = copy.copy(cache)
    for each in (cache, copied):
        still_right(model, each, prompt)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda c: c.crop(-3.7), "crop: expected an integer, got -3.7"),
        (lambda c: c.crop(True), "crop: expected an integer, got True"),
        (lambda c: c.crop(None), "crop: expected an integer"),
        (lambda c: c.crop(-41), "crop: expected at most 40"),
        (lambda c: c.reorder_cache(torch.tensor([0, 2])), "sequences: expected one or more of the cache's sequences, 0 to 1"),
        (lambda c: c.reorder_cache(torch.tensor([-1, 0])), "sequences: expected one or more"),
        (lambda c: c.reorder_cache(torch.tensor([], dtype=torch.long)), "sequences: expected one or more"),
        (lambda c: c.reorder_cache([0, 1]), "beam_idx: expected integers"),
        (lambda c: c.reorder_cache(torch.tensor([[0, 1]])), "beam_idx: expected integers"),
        (lambda c: c.reorder_cache(torch.tensor([0.0, 1.0])), "beam_idx: expected integers"),
        (lambda c: c.batch_select_indices(torch.tensor([False, False])), "sequences: expected one or more"),
        (lambda c: c.batch_select_indices(torch.tensor([True, True, False])), "indices: expected integers .*mask of all"),
        (lambda c: c.batch_select_indices(torch.tensor([5])), "sequences: expected one or more"),
        (lambda c: c.batch_select_indices(None), "indices: expected integers"),
        (lambda c: c.batch_repeat_interleave(0), "repeats: expected an integer >= 1, got 0"),
        (lambda c: c.batch_repeat_interleave(1.5), "repeats: expected an integer >= 1, got 1.5"),
        (lambda c: c.reserve("x"), "tokens: expected an integer >= 0"),
        (lambda c: c.reserve(100, 0), "sequences: expected an integer >= 1"),
        (lambda c: c.fork("full"), "method: expected a kvrecall method, got 'full'"),
        (lambda c: c.fork(kvrecall.Full), "method: expected a kvrecall method"),
        (lambda c: c.fork(rows_on_device=True), "rows_on_device: expected None or False"),
        (lambda c: c.save(None), "folder: expected a path, got None"),
        (lambda c: c.save("a\0b"), "folder: expected a path"),
        (lambda c: c.save("unused", about=[]), "about: expected a dict"),
        (lambda c: c.save("unused", about={"a": 2**60}), "about.'a'.: expected a text, a count"),
        (lambda c: c.save("unused", about={"a": None}), "about.'a'.: expected a text, a count"),
    ],
)  # fmt: skip
def test_operations_with_values_that_they_cannot_take(cache: Any, call: Any, says: str) -> None:
    tables = [list(table.blocks) for table in cache.tables]
    with pytest.raises(errors.ParameterError, match=says):
        call(cache)
    assert [list(table.blocks) for table in cache.tables] == tables and cache.get_seq_length() == 40


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"model": "x"}, "model: expected a transformers PreTrainedModel"),
        ({"device": "cuda:77"}, "device: expected cpu or a device that torch sees"),
        ({"device": "sofa"}, "device: expected cpu or a device that torch sees"),
        ({"device": 3.5}, "device: expected cpu or a device that torch sees"),
        ({"device": "meta"}, "device: expected cpu or a device that torch sees"),
        ({"host_rows": "int4"}, 'host_rows: expected "plain" or "fp8"'),
        ({"config": None}, "config: expected a transformers config"),
        ({"config": PretrainedConfig()}, "a config that does not tell the number of layers"),
        ({"folder": 3}, "folder: expected a path"),
    ],
)
def test_sessions_are_loaded_with_what_fits(cache: Any, tmp_path: Path, options: dict[str, Any], says: str) -> None:
    given = {"folder": tmp_path / "s", "config": tiny("llama").config} | options
    cache.save(tmp_path / "s")
    with pytest.raises(errors.KVRecallError, match=says):
        kvrecall.RetrievalCache.load(**given)


@pytest.mark.parametrize(
    "options", [{"observe_queries": value} for value in (-1, 1.5, "x", True)] + [{"rows_on_device": True}, {"host_rows": None}]
)
def test_options_of_a_cache(options: dict[str, Any]) -> None:
    with pytest.raises(errors.ParameterError, match=f"{next(iter(options))}: expected"):
        kvrecall.RetrievalCache(tiny("llama").config, COVERING, **options)


def test_schedule_must_ascend_and_end_open() -> None:
    step = kvrecall.ParisKV().schedule[0]
    with pytest.raises(errors.ParameterError, match="schedule"):
        kvrecall.ParisKV(schedule=(step,))


def test_cache_without_attach() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with pytest.raises(errors.NotAttachedError, match=r"kvrecall\.attach\(model\)"):
        greedy(model, cache, ids())
    assert cache.get_seq_length() == 0
    still_right(model, cache, ids())


@pytest.mark.parametrize("changes", [{"num_hidden_layers": 2}, {"num_key_value_heads": 4}, {"num_attention_heads": 2}], ids=str)
def test_cache_of_another_model(changes: dict[str, int]) -> None:
    model, other = tiny("llama"), tiny("llama", **changes)
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(other), pytest.raises(errors.CacheModelError, match="expected the model it was made for"):
        greedy(other, cache, ids())
    assert cache.get_seq_length() == 0
    still_right(model, cache, ids())


def test_another_dtype_in_the_middle() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model):
        first = greedy(model, cache, ids())
    with kvrecall.attach(model.bfloat16()), pytest.raises(errors.DeviceError, match=r"float32 on cpu, got torch\.bfloat16"):
        greedy(model, cache, torch.cat([first, ids(5)], 1))
    still_right(model.float(), kvrecall.RetrievalCache(model.config, COVERING), ids())


def test_unsupported_dtype() -> None:
    model = tiny("llama").double()
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    says = r"dtype of the keys: expected torch\.bfloat16 or torch\.float16 or torch\.float32, got torch\.float64\. .*cast the"
    with kvrecall.attach(model), pytest.raises(errors.DeviceError, match=says):
        greedy(model, cache, ids())
    assert cache.get_seq_length() == 0
    still_right(model.float(), cache, ids())


def test_unsupported_head_dim_is_refused_when_the_cache_is_made() -> None:
    says = r"llama: expected .*, got heads of 40 numbers \(kvrecall has kernels for 32, 64, 80, 96, 128, 192, 256\)"
    with pytest.raises(errors.UnsupportedModelError, match=says):
        kvrecall.RetrievalCache(tiny("llama", head_dim=40).config, COVERING)


@pytest.mark.parametrize("dim", [32, 64, 80, 96, 128, 192, 256])
def test_every_listed_head_dim_works(dim: int) -> None:
    model = tiny("llama", head_dim=dim)
    still_right(model, kvrecall.RetrievalCache(model.config, COVERING), ids())
    with kvrecall.attach(model):
        greedy(model, kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=5, **ZONES)), ids())


def test_another_batch_size() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model), torch.no_grad():
        model(ids(), **cache_argument(cache))
        with pytest.raises(errors.ShapeError, match="batch: expected 1 sequences, got 2"):
            model(ids(5, 2), **cache_argument(cache))
    assert cache.get_seq_length() == 111
    still_right(model, cache, torch.cat([ids(), ids(5)], 1))


def test_a_prompt_that_is_fed_again_from_its_beginning() -> None:
    """As transformers' assisted decoding feeds it to a cache that holds a part of it."""
    model, prompt = tiny("llama"), ids()
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model):
        model(prompt[:, :60], **cache_argument(cache))
        with pytest.raises(errors.ShapeError, match=r"behind the 60 that the cache holds, got these 60 again and 5\d more"):
            model.generate(prompt, **cache_argument(cache), max_new_tokens=4, do_sample=False, prompt_lookup_num_tokens=3)
    still_right(model, cache, prompt)
    twice = torch.cat([prompt, prompt, prompt[:, :5]], 1)
    own = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model):
        model(prompt, **cache_argument(own))
        with own.reading_prompt():
            logits = model(twice[:, 111:], **cache_argument(own)).logits  # a text that says it twice
    torch.testing.assert_close(logits[:, -1], model(twice).logits[:, -1], atol=1e-4, rtol=1e-4)


def test_four_dimensional_mask() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    mask = torch.ones(1, 1, 111, 111, dtype=torch.bool).tril()
    with kvrecall.attach(model), torch.no_grad(), pytest.raises(errors.ShapeError, match="2-D padding mask"):
        model(ids(), attention_mask=mask, **cache_argument(cache))
    assert cache.get_seq_length() == 0


def test_non_finite_keys_store_nothing() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    with kvrecall.attach(model), torch.no_grad():
        model(ids(), **cache_argument(cache))
        overflow = model.model.layers[1].self_attn.k_proj.register_forward_hook(lambda _, args, keys: keys * float("nan"))
        with pytest.raises(errors.NonFiniteError, match="layer 1, sequence 0"):
            model(ids(5), **cache_argument(cache))
        overflow.remove()
    assert cache.retrieval_layers[1].get_seq_length() == 111
    cache.align()
    assert cache.get_seq_length() == 111
    still_right(model, cache, torch.cat([ids(), ids(5)], 1))


def test_host_memory_is_checked_before_anything_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrecall.backends.transformers import cache as module

    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    need = 2 * 64 * 4 * 2 * 3 * 300  # K|V, D, fp32, KV heads, layers, tokens
    monkeypatch.setattr(module, "available_host_bytes", lambda: need - 1)
    with kvrecall.attach(model), pytest.raises(errors.HostMemoryError, match=f"300 tokens need {need:,} bytes"):
        greedy(model, cache, ids(300))
    assert cache.get_seq_length() == 0
    monkeypatch.setattr(module, "available_host_bytes", lambda: need)
    still_right(model, cache, ids(300))


def test_engine_checks_memory_of_prompt_and_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    from kvrecall.backends.transformers import cache as module

    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    monkeypatch.setattr(module, "available_host_bytes", lambda: 10_000)
    with pytest.raises(errors.HostMemoryError, match="nothing was stored"):
        engine.generate(model, None, ids(), cache, max_new_tokens=5)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("stop_layer", [0, 1, 2])
def test_ctrl_c_in_the_middle_of_a_forward_pass(stop_layer: int) -> None:
    """A real SIGINT while a layer is storing: it comes through after that layer, and the cache can be used again."""
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    seen = []

    def interrupt(layer: int, queries: torch.Tensor) -> None:
        seen.append(layer)
        if len(seen) == 3 * 12 + stop_layer + 1:
            os.kill(os.getpid(), signal.SIGINT)

    cache.on_queries = interrupt
    with pytest.raises(KeyboardInterrupt):
        engine.generate(model, None, ids(), cache, max_new_tokens=40, chunk_tokens=40)
    cache.on_queries = None
    assert len({layer.get_seq_length() for layer in cache.retrieval_layers}) == 1
    assert cache.get_seq_length() > 111
    cache.crop(111 - cache.get_seq_length())
    still_right(model, cache, torch.cat([ids(), ids(5)], 1))


def test_ctrl_c_without_the_engine_is_mended_at_the_next_call() -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)

    def interrupt(layer: int, queries: torch.Tensor) -> None:
        if layer == 1 and queries.shape[2] == 5:
            raise KeyboardInterrupt

    cache.on_queries = interrupt
    with kvrecall.attach(model), torch.no_grad():
        model(ids(), **cache_argument(cache))
        with pytest.raises(KeyboardInterrupt):
            model(ids(5), **cache_argument(cache))
        cache.on_queries = None
        with pytest.raises(errors.KVRecallError, match="interrupted"):
            model(ids(5), **cache_argument(cache))
    assert cache.get_seq_length() == 111
    still_right(model, cache, torch.cat([ids(), ids(5)], 1))


@pytest.mark.parametrize(
    ("call", "error", "says"),
    [
        ({"input_ids": torch.zeros(1, 0, dtype=torch.int64)}, errors.ShapeError, "non-empty"),
        ({"input_ids": ids(4000), "max_new_tokens": 200}, errors.ContextLengthError, "at most 4,096 tokens, got 4,200"),
        ({"max_new_tokens": 0}, errors.ParameterError, "max_new_tokens"),
        ({"chunk_tokens": 0}, errors.ParameterError, "chunk_tokens"),
        ({"temperature": -1.0}, errors.ParameterError, "temperature"),
        ({"top_p": 0.0}, errors.ParameterError, "top_p"),
        ({"attention_mask": torch.ones(1, 3)}, errors.ShapeError, "attention_mask"),
        (
            {"input_ids": ids().float()},
            errors.ParameterError,
            r"a tensor of int64 token ids, got 'torch\.float32'.*tokenizer\(",
        ),
        ({"input_ids": [1, 2]}, errors.ParameterError, "a tensor of int64 token ids, got 'list'"),
        ({"input_ids": ids() + 300}, errors.ParameterError, "ids from 0 to below 320, got 6"),
        ({"input_ids": ids() - 400}, errors.ParameterError, "ids from 0 to below 320, got -"),
        ({"max_new_tokens": 1.5}, errors.ParameterError, "max_new_tokens: expected an integer >= 1, got 1.5"),
        ({"max_new_tokens": "3"}, errors.ParameterError, "max_new_tokens"),
        ({"max_new_tokens": 1 << 40}, errors.ContextLengthError, "prompt and answer"),
        ({"temperature": "1"}, errors.ParameterError, "temperature"),
        ({"chunk_tokens": 1.5}, errors.ParameterError, "chunk_tokens"),
        ({"tokenizer": 3}, errors.ParameterError, "tokenizer: expected the model's tokenizer, got 'int'"),
        ({"cache": "pariskv"}, errors.ParameterError, "cache: expected a RetrievalCache or a kvrecall method, got 'str'"),
        ({"cache": DynamicCache()}, errors.ParameterError, "got 'DynamicCache'"),
    ],
    ids=[
        "empty",
        "too-long",
        "no-answer",
        "chunk",
        "temperature",
        "top-p",
        "mask",
        "float-ids",
        "list",
        "above",
        "below",
        "half-a-token",
        "text",
        "huge",
        "temperature-text",
        "half-a-chunk",
        "tokenizer",
        "name",
        "other-cache",
    ],
)
def test_generate_refuses(call: dict[str, Any], error: type[Exception], says: str) -> None:
    model = tiny("llama")
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    given: dict[str, Any] = {"tokenizer": None, "input_ids": ids(), "cache": cache, "max_new_tokens": 5, **call}
    with pytest.raises(error, match=says):
        engine.generate(model, **given)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize(
    "change",
    [
        lambda cache: cache.reorder_cache(torch.tensor([0, 3])),
        lambda cache: cache.reorder_cache(torch.tensor([], dtype=torch.int64)),
        lambda cache: cache.batch_select_indices(torch.tensor([False, False])),
        lambda cache: cache.batch_select_indices(torch.tensor([True])),
        lambda cache: cache.batch_repeat_interleave(0),
    ],
    ids=["beyond", "none", "no-flag", "one-flag", "repeat-0"],
)
def test_sequences_that_there_are_not(change: Any) -> None:
    model, prompt = tiny("llama"), ids(40, 2)
    cache = kvrecall.RetrievalCache(model.config, COVERING)
    engine.prefill(model, prompt, cache)
    with pytest.raises(errors.ParameterError, match=r"(sequences|indices|beam_idx|repeats): expected "):
        change(cache)
    assert torch.equal(cache.tokens.ids(), prompt)  # type: ignore[arg-type]
    still_right(model, cache, torch.cat([prompt, prompt[:, :5]], 1))


def test_wrong_things_where_a_model_or_method_belongs() -> None:
    model = tiny("llama")
    with pytest.raises(errors.ParameterError, match="method"):
        kvrecall.RetrievalCache(model.config, "pariskv")  # type: ignore[arg-type]
    with pytest.raises(errors.ParameterError, match=r"Pass model\.config"):
        kvrecall.RetrievalCache(model, COVERING)  # type: ignore[arg-type]
    with pytest.raises(errors.ParameterError, match="PreTrainedModel"), kvrecall.attach(torch.nn.Linear(2, 2)):  # type: ignore[arg-type]
        pass
