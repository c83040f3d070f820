"""The ends of several prompts that begin alike, read in one call: every request is as if it were read alone."""

from __future__ import annotations

import gc
import weakref
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers import layer, multi_request
from kvrecall.core.errors import NonFiniteError
from kvrecall.engine.decoding import Decoding
from kvrecall.engine.loop import loop_of
from tests.backends.models import tiny
from tests.blocks import small_blocks
from tests.engine.test_lookup import text
from tests.engine.users import METHODS, idle

GENERATED: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0, "seed": 3}
Shape = tuple[int, int]


@pytest.fixture(autouse=True)
def several_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    small_blocks(monkeypatch)


def read(model: Any, method: str = "pariskv") -> kvrecall.RetrievalCache:
    """A document."""
    cache = kvrecall.RetrievalCache(model.config, METHODS[method])
    engine.prefill(model, text(), cache)
    return cache


def questions(*lengths: int) -> list[Tensor]:
    """Prompts that begin with the document, with so many tokens behind it."""
    draw = torch.Generator().manual_seed(1)
    return [torch.cat([text(), torch.randint(3, 320, (1, length), generator=draw)], 1) for length in lengths]


def shapes(model: Any) -> list[Shape]:
    """Of the ids of every call from here on."""
    seen: list[Shape] = []
    model.register_forward_pre_hook(lambda _, args, kwargs: seen.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True)
    return seen


def asked(model: Any, document: kvrecall.RetrievalCache, prompts: list[Tensor], **more: Any) -> list[engine.Request]:
    submit = engine.Engine.of(model).submit
    return [submit(None, ids, document.fork(), **GENERATED | more) for ids in prompts]


def alone(model: Any, document: kvrecall.RetrievalCache, prompts: list[Tensor], **more: Any) -> list[list[list[int]]]:
    return [engine.generate(model, None, ids, document.fork(), **GENERATED | more).new_tokens for ids in prompts]


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("method", list(METHODS))
def test_questions_are_read_in_one_call(method: str, exact: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of different lengths; the document's rows are read once for all."""
    model, together, shared = tiny("llama"), multi_request.attend_together, list[int]()
    document, prompts = read(model, method), questions(9, 4, 17)
    exact = exact and method != "full"
    expected = alone(model, document, prompts, exact=exact)

    def watched(chunks: Any, params: Any) -> Any:
        made = together(chunks, params)
        shared.append(0 if made is None else made[0].tokens)
        return made

    monkeypatch.setattr(multi_request, "attend_together", watched)
    seen = shapes(model)
    requests = asked(model, document, prompts, exact=exact)
    assert [request.result().new_tokens for request in requests] == expected
    assert seen[0] == (3, 17) and (exact or all(tokens == 1 for _, tokens in seen[1:]))
    assert shared and min(shared[:3]) > 60
    for request, ids in zip(requests, prompts, strict=True):
        assert request.result().cache.tokens.ids()[:, : ids.shape[1]].equal(ids)  # type: ignore[index]


def test_what_is_read_alone() -> None:
    """A single token, which searches; prompts of other documents; long ends, and those with prompt look-up."""
    model = tiny("llama")
    document, other = read(model), read(model)
    prompts, seen = questions(1, 1), shapes(model)
    expected = alone(model, document, prompts)
    assert [request.result().new_tokens for request in asked(model, document, prompts)] == expected
    for prompts, documents, more in (
        (questions(9, 4), (document, other), {}),
        (questions(9, 1100), (document, document), {"max_new_tokens": 2}),
        (questions(9, 4), (document, document), {"prompt_lookup_num_tokens": 3}),
    ):
        del seen[:]
        expected = [alone(model, own, [ids], **more)[0] for ids, own in zip(prompts, documents, strict=True)]
        del seen[:]
        requests = [asked(model, own, [ids], **more)[0] for ids, own in zip(prompts, documents, strict=True)]
        assert [request.result().new_tokens for request in requests] == expected
        assert seen[0][0] == 1 and not any(rows > 1 and tokens > 1 for rows, tokens in seen)


def test_a_call_that_fails_is_made_alone() -> None:
    model = tiny("llama")
    document, prompts, failed = read(model), questions(9, 4, 17), list[Shape]()
    expected = alone(model, document, prompts)

    def failing(_: Any, args: Any, kwargs: Any) -> None:
        if min(kwargs["input_ids"].shape) > 1:
            failed.append(tuple(kwargs["input_ids"].shape))
            raise torch.OutOfMemoryError("no memory for so many")

    model.register_forward_pre_hook(failing, with_kwargs=True)
    assert [request.result().new_tokens for request in asked(model, document, prompts)] == expected
    assert failed == [(3, 17)]


def test_a_call_that_cannot_be_prepared_is_made_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, failed = tiny("llama"), list[int]()
    document, prompts = read(model), questions(9, 4)
    expected = alone(model, document, prompts)

    def failing(_: Any) -> Tensor:
        failed.append(1)
        raise torch.OutOfMemoryError("no memory")

    monkeypatch.setattr(Decoding, "to_read", failing)
    assert [request.result().new_tokens for request in asked(model, document, prompts)] == expected and failed


def test_one_that_has_no_memory_in_the_call_is_read_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = tiny("llama"), list[int]()
    document, prompts = read(model), questions(9, 4, 17)
    expected, own = alone(model, document, prompts), layer.base.attend

    def attend(state: Any, new: Any, *more: Any) -> Tensor:
        calls.append(new.count)
        if len(calls) == 5:  # the second layer of the second request
            raise torch.OutOfMemoryError("no memory")
        return own(state, new, *more)

    monkeypatch.setattr(layer.base, "attend", attend)
    seen = shapes(model)
    assert [request.result().new_tokens for request in asked(model, document, prompts)] == expected
    assert seen[0] == (3, 17) and (1, 4) in seen


def test_padding_in_the_ends_is_not_read_together() -> None:
    model = tiny("llama")
    document = read(model)
    ids = torch.cat([text(), torch.zeros(1, 40, dtype=torch.int64), questions(9)[0][:, -9:]], 1)
    more = {"attention_mask": (ids > 0).long()}
    expected, seen = alone(model, document, [ids], **more), shapes(model)
    requests = asked(model, document, [ids, ids], **more)
    assert [request.result().new_tokens for request in requests] == expected * 2
    assert all(rows == 1 for rows, tokens in seen if tokens > 1)
    assert requests[0].result().cache.get_seq_length() == ids.shape[1] + 11


def test_one_that_cannot_share_leaves_the_others_together() -> None:
    """A question of a single token, which searches."""
    model = tiny("llama")
    document, prompts = read(model), questions(9, 1, 17, 4)
    expected, seen = alone(model, document, prompts), shapes(model)
    assert [request.result().new_tokens for request in asked(model, document, prompts)] == expected
    assert (3, 17) in seen


@pytest.mark.parametrize("interrupt", [False, True])
def test_errors_hold_no_cache(interrupt: bool) -> None:
    """Of a request in a call that then fails as a whole, or is interrupted; and of a request that has failed."""
    model, left = tiny("llama"), [1]
    document, prompts = read(model), questions(9, 9)

    def broken(module: Any, args: Any, output: Tensor) -> Tensor:
        if output.shape[:2] == (2, 9) or not left:
            output = output.clone()
            output[-1] = float("nan")
        return output

    def failing(*_: Any) -> None:
        if left:
            left.clear()
            raise KeyboardInterrupt if interrupt else torch.OutOfMemoryError("no memory")

    hooks = [
        model.model.layers[1].self_attn.k_proj.register_forward_hook(broken), model.lm_head.register_forward_hook(failing),
    ]  # fmt: skip

    def run() -> list[Any]:
        caches = [document.fork() for _ in prompts]
        submit = engine.Engine.of(model).submit
        requests = [submit(None, ids, own, **GENERATED) for ids, own in zip(prompts, caches, strict=True)]
        for request in requests:
            with suppress(KeyboardInterrupt, NonFiniteError):
                request.result()
        return [weakref.ref(cache) for cache in caches]

    held = run()
    gc.collect()
    for hook in hooks:
        hook.remove()
    assert [cache() for cache in held] == [None, None] and not left


def test_an_error_of_one_is_its_own() -> None:
    model = tiny("llama")
    document, prompts = read(model), questions(9, 4, 17)
    expected = alone(model, document, prompts)

    def broken(module: Any, args: Any, output: Tensor) -> Tensor:
        if output.shape[0] == 3 and output.shape[1] > 1:
            output = output.clone()
            output[1, 0] = float("nan")
        return output

    handle = model.model.layers[1].self_attn.k_proj.register_forward_hook(broken)
    requests = asked(model, document, prompts)
    with pytest.raises(NonFiniteError):
        requests[1].result()
    handle.remove()
    assert [requests[n].result().new_tokens for n in (0, 2)] == [expected[0], expected[2]]
    assert document.get_seq_length() == text().shape[1] and alone(model, document, prompts) == expected


def test_after_an_interrupt_the_others_go_on() -> None:
    model = tiny("llama")
    document, prompts, left = read(model), questions(9, 4, 17), [1]
    expected = alone(model, document, prompts)

    def interrupted(_: Any, args: Any, output: Tensor) -> None:
        if output.shape[0] == 3 and left:
            left.clear()
            raise KeyboardInterrupt

    hook = model.model.layers[1].self_attn.k_proj.register_forward_hook(interrupted)
    requests = asked(model, document, prompts)
    with pytest.raises(KeyboardInterrupt):
        requests[0].result()
    hook.remove()
    assert not left and [request.result().new_tokens for request in requests[1:]] == expected[1:]
    assert idle(model) and not loop_of(model)._active
