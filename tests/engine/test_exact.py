"""Exact answers in the loop: those of full attention, whatever the method drafts, and a cache as full attention makes it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers import multi_request
from kvrecall.core.errors import ParameterError
from kvrecall.engine.exact import MOST_DRAFTS, DraftLength
from kvrecall.engine.loop import loop_of
from tests.backends.models import tiny
from tests.backends.test_hybrids import FAMILIES as HYBRIDS
from tests.backends.test_hybrids import model_of
from tests.backends.test_transformers import METHODS as COVERING
from tests.blocks import small_blocks
from tests.engine.test_decoding import HONOURED
from tests.engine.test_lookup import text
from tests.engine.users import METHODS as SPARSE
from tests.engine.users import User, idle, in_threads

SEARCHING = [name for name in SPARSE if name != "full"]


def full(model: Any, ids: Tensor, tokens: int = 30, **more: Any) -> engine.GenerateResult:
    """The answer by full attention."""
    return engine.generate(model, None, ids, COVERING["full"], max_new_tokens=tokens, chunk_tokens=64, **more)


def rows(cache: kvrecall.RetrievalCache, layer: int, sequence: int = 0) -> Tensor:
    """All keys and values of a layer, `[H_kv, tokens, 2, D]`."""
    state = cache.retrieval_layers[layer].state
    assert state is not None
    kept = state.store
    zones, resident = kept.zones(sequence), kept.resident.view(sequence)
    return torch.cat([resident[:, : zones.sink], *kept.host[sequence].blocks(), resident[:, zones.sink :]], 1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3", "gpt_oss"])
@pytest.mark.parametrize("method", SEARCHING)
def test_tokens_and_cache_are_those_of_full_attention(method: str, family: str) -> None:
    model, ids = tiny(family), text()
    expected = full(model, ids)
    made = engine.generate(model, None, ids, SPARSE[method], max_new_tokens=30, chunk_tokens=64, exact=True)
    assert torch.equal(made.sequences, expected.sequences)
    assert made.drafts is not None and 0 < made.drafts.accepted < made.drafts.drafted
    assert made.drafts.checks + made.drafts.accepted == 29, "each check gives one token more than the drafts that it accepts"
    assert made.cache.get_seq_length() == expected.cache.get_seq_length() == 179
    for layer in range(len(made.cache.retrieval_layers)):
        torch.testing.assert_close(rows(made.cache, layer), rows(expected.cache, layer), atol=2e-5, rtol=2e-5)
    assert not any(getattr(layer, "record_past", False) for layer in made.cache.layers)


@pytest.mark.parametrize("sampled", [False, True], ids=["greedy", "sampled"])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_look_up_drafts_too(family: str, sampled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A text that repeats itself: look-up saves drafting steps, and the answer stays."""
    model = tiny(family)
    ids = text(20).repeat(1, 8)
    given: dict[str, Any] = {"temperature": 1.0, "seed": 3} if sampled else {}
    expected, widths, forward = full(model, ids), list[int](), model.forward

    def watched(*args: Any, **kwargs: Any) -> Any:
        widths.append(kwargs["input_ids"].shape[1])
        return forward(*args, **kwargs)

    monkeypatch.setattr(model, "forward", watched)
    how: dict[str, Any] = {"max_new_tokens": 30, "chunk_tokens": 64, "exact": True, **given}
    made = engine.generate(model, None, ids, COVERING["pariskv"], prompt_lookup_num_tokens=5, **how)
    if not sampled:
        assert torch.equal(made.sequences, expected.sequences)
    assert max(width for width in widths if width < 32) > 1 and len(made.new_tokens[0]) == 30


@pytest.mark.parametrize("method", ["pariskv", "prkv"])
def test_sequences_of_a_batch(method: str) -> None:
    """Padding of several lengths, and ends of answers at several tokens."""
    model = tiny("llama")
    user = User(SPARSE[method], lengths=(90, 70, 81), new_tokens=25)
    given: dict[str, Any] = {"attention_mask": user.mask, "eos_token_id": list(range(0, 320, 9))}
    expected = full(model, user.ids, 25, **given)
    made = engine.generate(model, None, user.ids, SPARSE[method], max_new_tokens=25, chunk_tokens=64, exact=True, **given)
    assert made.new_tokens == expected.new_tokens and torch.equal(made.sequences, expected.sequences)
    assert len(set(map(len, made.new_tokens))) > 1


@pytest.mark.parametrize("name", [name for name in HONOURED if name != "guided"])
def test_the_model_s_generation_config_holds(name: str) -> None:
    model, ids = tiny("llama"), text(80)
    model.generation_config.update(pad_token_id=0, **HONOURED[name])
    expected = full(model, ids, 15)
    made = engine.generate(model, None, ids, SPARSE["pariskv"], max_new_tokens=15, chunk_tokens=64, exact=True)
    assert torch.equal(made.sequences, expected.sequences)


@pytest.mark.parametrize("look_up", [{}, {"prompt_lookup_num_tokens": 3}], ids=["alone", "look-up"])
def test_drawn_tokens_have_the_distribution_of_full_attention(look_up: dict[str, Any]) -> None:
    """Pairs of the third and fourth token of many answers, from eight possible tokens, by Pearson's test."""
    model, ids = tiny("llama"), text(60)
    words = list(range(40, 45))
    model.generation_config.update(pad_token_id=0, suppress_tokens=[n for n in range(320) if n not in words])
    many = ids if look_up else ids.expand(60, -1)  # look-up is for one sequence
    how: dict[str, Any] = {"max_new_tokens": 3, "chunk_tokens": 64, "temperature": 3.0}

    def drawn(method: kvrecall.Method, first: int, **more: Any) -> Counter[tuple[int, ...]]:
        seen = Counter[tuple[int, ...]]()
        for seed in range(first, first + (200 if look_up else 6)):
            made = engine.generate(model, None, many, method, seed=seed, **how, **more)
            seen.update(tuple(new[1:]) for new in made.new_tokens)
        return seen

    ours, theirs = drawn(SPARSE["pariskv"], 0, exact=True, **look_up), drawn(COVERING["full"], 1000)
    pairs = sorted({*ours, *theirs})
    statistic = sum((ours[pair] - theirs[pair]) ** 2 / (ours[pair] + theirs[pair]) for pair in pairs)
    freedom = len(pairs) - 1
    assert freedom >= 10 and statistic < freedom + 4 * (2 * freedom) ** 0.5, (statistic, freedom)


def test_a_seed_gives_the_same_tokens_again() -> None:
    model, ids = tiny("llama"), text(90)
    how: dict[str, Any] = {"max_new_tokens": 20, "temperature": 1.0, "exact": True}
    first, again = (engine.generate(model, None, ids, SPARSE["pariskv"], seed=5, **how).new_tokens for _ in range(2))
    assert first == again != engine.generate(model, None, ids, SPARSE["pariskv"], seed=6, **how).new_tokens
    document = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    engine.prefill(model, ids[:, :80], document)
    ask = engine.Engine.of(model).submit
    other = ask(None, ids, document.fork(), seed=9, **how | {"max_new_tokens": 7})
    beside = ask(None, ids, document.fork(), seed=5, **how)
    assert beside.result().new_tokens == first and other.done, "whoever is asked beside it"


def test_tokens_that_searched_before_are_read_again(tmp_path: Path) -> None:
    """An answer without `exact` leaves keys and values of searches in the cache. A saved session does not say which."""
    model, ids = tiny("llama"), text(90)
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    said = engine.generate(model, None, ids, cache, max_new_tokens=20).sequences
    ids = torch.cat([said, text(5, 7)], 1)
    expected = full(model, ids)
    assert not torch.allclose(rows(cache, 1), rows(full(model, said[:, :-1], 1).cache, 1), atol=1e-4)
    cache.save(tmp_path)
    loaded = kvrecall.RetrievalCache.load(tmp_path, model.config, model=model)
    for held in (cache.fork(), cache.fork(SPARSE["exact"]), loaded, cache):
        made = engine.generate(model, None, ids, held, max_new_tokens=30, exact=True)
        assert torch.equal(made.sequences, expected.sequences)
        torch.testing.assert_close(rows(held, 1), rows(expected.cache, 1), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("family", ["gemma2", "lfm2", "jamba"])
def test_where_layers_cannot_remove_them_all_tokens_are_read_again(family: str) -> None:
    model = tiny(family) if family == "gemma2" else model_of(family)
    ids = text(70) % 97 + 1
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    ids = torch.cat([engine.generate(model, None, ids, cache, max_new_tokens=20).sequences, ids[:, :5]], 1)
    made = engine.generate(model, None, ids, cache, max_new_tokens=10, exact=True)
    assert torch.equal(made.sequences, full(model, ids, 10).sequences)


def test_tokens_that_ids_do_not_describe_are_not_read_as_text() -> None:
    """A cache that cannot remove tokens is read again from the prompt, but not if images stood there."""
    model, ids = tiny("gemma2"), text(70)
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    ids = torch.cat([engine.generate(model, None, ids, cache, max_new_tokens=20).sequences, ids[:, :5]], 1)
    cache.tokens.known = False
    with pytest.raises(ParameterError, match="embeddings or images"):
        engine.generate(model, None, ids, cache, max_new_tokens=4, exact=True)
    assert cache.get_seq_length() == 89


@pytest.mark.parametrize("family", ["llama", "jamba"])
def test_autocast_of_the_asking_thread_holds_for_all_passes(family: str) -> None:
    model = model_of(family) if family == "jamba" else tiny(family)
    ids = text(70) % 97 + 1
    with torch.autocast("cpu", torch.bfloat16):
        expected = full(model, ids, 12).new_tokens
        requests = [
            engine.Engine.of(model).submit(None, ids, method, max_new_tokens=12, exact=True)
            for method in (SPARSE["pariskv"], SPARSE["louiskv"])
        ]
    made = [request.result() for request in requests]
    assert any(each.drafts is not None and each.drafts.accepted < each.drafts.drafted for each in made)
    assert all(each.cache.retrieval_layers[0].state.shape.dtype == torch.bfloat16 for each in made)
    assert [each.new_tokens[0][:3] for each in made] == [expected[0][:3]] * 2, "up to ties"


@pytest.mark.parametrize("family", ["llama", "gemma2", "jamba"])
def test_a_cancelled_request_leaves_no_drafts(family: str) -> None:
    model = model_of(family) if family == "jamba" else tiny(family)
    ids = text(70) % 97 + 1
    expected = full(model, ids, 20).sequences
    for steps in (3, 4, 5, 6):  # some of them in the middle of drafts
        cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
        request = engine.Engine.of(model).submit(None, ids, cache, max_new_tokens=20, exact=True)
        loop, left = loop_of(model), [steps]

        def some(left: list[int] = left) -> bool:
            left[0] -= 1
            return left[0] < 0

        loop._drive(request._job, some)
        request.cancel()
        held = cache.tokens.ids()
        assert held is not None and held.shape[1] == cache.get_seq_length() >= 70
        assert torch.equal(held, expected[:, : held.shape[1]])
        more = torch.cat([held, ids[:, :2]], 1)
        made = engine.generate(model, None, more, cache, max_new_tokens=8, exact=True)
        assert torch.equal(made.sequences, full(model, more, 8).sequences)


def test_an_exact_conversation_is_not_read_again() -> None:
    model, ids = tiny("llama"), text(90)
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    said = engine.generate(model, None, ids, cache, max_new_tokens=20, exact=True).sequences
    assert cache.tokens.exact(1000) == 1000 and cache.tokens.answered
    read: list[tuple[int, int]] = []
    ids = torch.cat([said, text(5, 7)], 1)
    made = engine.generate(
        model, None, ids, cache, max_new_tokens=20, exact=True, chunk_tokens=2, on_prefill=lambda *told: read.append(told)
    )
    assert read[0] == (109, 115) and torch.equal(made.sequences, full(model, ids, 20).sequences)


def test_a_single_new_token_and_short_answers() -> None:
    """The whole prompt but one token is held: that token attends to everything, too."""
    model, ids = tiny("llama"), text(120)
    expected = full(model, ids, 9).sequences
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    for count in (1, 2, 3, 9):
        made = engine.generate(model, None, ids, cache, max_new_tokens=count, exact=True)
        assert torch.equal(made.sequences, expected[:, : 120 + count])


def test_short_sequences_are_not_drafted() -> None:
    """Until they are long enough to search, decode steps attend to everything."""
    model, ids = tiny("llama"), text(40)
    method = replace(SPARSE["pariskv"], full_attention_threshold=60)
    made = engine.generate(model, None, ids, method, max_new_tokens=10, exact=True)
    assert torch.equal(made.sequences, full(model, ids, 10).sequences)
    assert made.drafts is not None and made.drafts.checks == 0
    longer = engine.generate(model, None, ids, method, max_new_tokens=40, exact=True)
    assert torch.equal(longer.sequences, full(model, ids, 40).sequences)
    assert longer.drafts is not None and 0 < longer.drafts.checks < 30


def test_beside_other_requests_and_on_forks() -> None:
    """Exact requests and others, of several methods and lengths, at once; a document's forks, too."""
    model = tiny("llama")
    users = [User(SPARSE[name], seed=n, new_tokens=15, more={"temperature": 0.0}) for n, name in enumerate(SEARCHING)]
    calls, expected = [], []
    for one in users:
        calls.append(lambda one=one: one.submit(model).result().new_tokens)
        expected.append(one.alone(model))
        calls.append(lambda one=one: one.submit(model, exact=True).result().new_tokens)
        expected.append(full(model, one.ids, 15).new_tokens)
    document = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    engine.prefill(model, text(), document)
    for question in range(4):
        ids = torch.cat([text(), text(4 + question, 50 + question)], 1)
        calls.append(
            lambda ids=ids: (
                engine.Engine.of(model).submit(None, ids, document.fork(), max_new_tokens=15, exact=True).result().new_tokens
            )
        )
        expected.append(full(model, ids, 15).new_tokens)
    assert in_threads(calls) == expected and idle(model)


@pytest.mark.parametrize("where", ["on_token", "draft", "check"])
def test_after_an_interrupt_it_goes_on(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama"), text()
    cache = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    expected, left, forward = full(model, ids).sequences, [7], model.forward

    def interrupted(*args: Any, **kwargs: Any) -> Any:
        made = forward(*args, **kwargs)
        left[0] -= (kwargs["input_ids"].shape[1] == 1) == (where == "draft") and kwargs["input_ids"].shape[1] < 40
        if not left[0]:
            raise KeyboardInterrupt
        return made

    def told(count: int) -> None:
        if count == 9:
            raise KeyboardInterrupt

    if where != "on_token":
        monkeypatch.setattr(model, "forward", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.generate(model, None, ids, cache, max_new_tokens=30, exact=True, on_token=told if where == "on_token" else None)
    held = cache.tokens.ids()
    assert held is not None and held.shape[1] == cache.get_seq_length() >= 150
    assert torch.equal(held, expected[:, : held.shape[1]]), "no draft stays"
    monkeypatch.setattr(model, "forward", forward)
    made = engine.generate(model, None, ids, cache, max_new_tokens=30, exact=True)
    assert torch.equal(made.sequences, expected) and idle(model) and not loop_of(model)._active


def test_what_cannot_be_exact_is_refused(tmp_path: Path) -> None:
    model, ids = tiny("llama"), text(40)
    plain = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    engine.prefill(model, ids[:, :30], plain)
    plain.save(tmp_path / "first", rows="fp8")
    loaded = kvrecall.RetrievalCache.load(tmp_path / "first", model.config, model=model)
    loaded.save(tmp_path / "again")
    again = kvrecall.RetrievalCache.load(tmp_path / "again", model.config)
    eight = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"], host_rows="fp8")
    for rounded in (eight, loaded, loaded.fork(), again):
        with pytest.raises(ParameterError, match="not rounded"):
            engine.generate(model, None, ids, rounded, max_new_tokens=4, exact=True)
    dynamic = tiny("llama", rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4})
    with pytest.raises(ParameterError, match="a dynamic one"):
        engine.generate(dynamic, None, ids, SPARSE["pariskv"], max_new_tokens=4, exact=True)
    loaded.reset()
    for exact in (plain, loaded):
        assert torch.equal(
            engine.generate(model, None, ids, exact, max_new_tokens=4, exact=True).sequences, full(model, ids, 4).sequences
        )


@pytest.mark.parametrize("how", [{"exact": True}, {"prompt_lookup_num_tokens": 3}], ids=["exact", "look-up"])
def test_processors_that_remember_tokens_are_refused(how: dict[str, Any]) -> None:
    model = tiny("llama")
    model.generation_config.update(pad_token_id=0, guidance_scale=1.5)
    with pytest.raises(ParameterError, match="guidance_scale left out"):
        engine.generate(model, None, text(40), SPARSE["pariskv"], max_new_tokens=4, **how)


@pytest.mark.parametrize("family", HYBRIDS)
def test_hybrids(family: str) -> None:
    """Running states cannot remove a draft: they go back, and read what was right again."""
    model, ids = model_of(family), text(70) % 97 + 1
    expected = full(model, ids, 20)
    made = engine.generate(model, None, ids, SPARSE["pariskv"], max_new_tokens=20, chunk_tokens=64, exact=True)
    assert torch.equal(made.sequences, expected.sequences)
    assert made.drafts is not None and made.drafts.checks > 0
    more = torch.cat([made.sequences, ids[:, :3]], 1)
    expected = full(model, more, 10).sequences
    assert torch.equal(engine.generate(model, None, more, made.cache, max_new_tokens=10, exact=True).sequences, expected)


def test_the_length_of_drafts_follows_what_was_right() -> None:
    often, seldom, far = DraftLength(3), DraftLength(3), DraftLength(40)
    for _ in range(20):
        for each in (often, far):
            each.saw(each.tokens, each.tokens)
        seldom.saw(0, seldom.tokens)
    assert seldom.tokens == 1 < often.tokens <= far.tokens <= MOST_DRAFTS


@pytest.mark.parametrize("name", ["pariskv", "prkv", "louiskv"])
def test_one_check_reads_shared_rows_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all questions about a document; padded where questions have drafted differently many tokens."""
    small_blocks(monkeypatch)
    model, read = tiny("llama"), list[int]()
    document = kvrecall.RetrievalCache(model.config, SPARSE[name])
    engine.prefill(model, text(), document)
    questions = [torch.cat([text(), text(4 + n, 50 + n)], 1) for n in range(4)]
    expected = [full(model, ids, 20).new_tokens for ids in questions]
    widths, together = list[tuple[int, ...]](), multi_request.attend_together
    model.register_forward_pre_hook(lambda _, args, kwargs: widths.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)

    def shared(chunks: Any, params: Any) -> Any:
        made = together(chunks, params)
        read.append(0 if made is None else made[0].tokens)
        return made

    monkeypatch.setattr(multi_request, "attend_together", shared)
    ask = engine.Engine.of(model).submit
    requests = [ask(None, ids, document.fork(), max_new_tokens=20, exact=True) for ids in questions]
    assert [request.result().new_tokens for request in requests] == expected
    checks = [shape for shape in widths if shape[0] > 1 and shape[1] > 1]
    assert len(checks) > 3 and max(rows for rows, _ in checks) == 4
    assert read and min(read) > 60, "most of the document is read for all at once"
    for request in requests:
        made = request.result()
        held = full(model, made.sequences[:, :-1], 1).cache
        for layer in range(3):
            torch.testing.assert_close(rows(made.cache, layer), rows(held, layer), atol=2e-5, rtol=2e-5)


def test_a_check_that_fails_together_is_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)
    model = tiny("llama")
    document = kvrecall.RetrievalCache(model.config, SPARSE["pariskv"])
    engine.prefill(model, text(), document)
    questions = [torch.cat([text(), text(4 + n, 50 + n)], 1) for n in range(2)]
    expected = [full(model, ids, 12).new_tokens for ids in questions]
    failed = list[int]()

    def failing(_: Any, args: Any, kwargs: Any) -> None:
        if min(kwargs["input_ids"].shape) > 1:
            failed.append(1)
            raise RuntimeError("no memory for so many")

    model.register_forward_pre_hook(failing, with_kwargs=True)
    ask = engine.Engine.of(model).submit
    requests = [ask(None, ids, document.fork(), max_new_tokens=12, exact=True) for ids in questions]
    assert [request.result().new_tokens for request in requests] == expected
    assert failed
