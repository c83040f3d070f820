"""A cache belongs to one thread and one request at a time: others wait or are refused, and answers stay what they are alone."""

from __future__ import annotations

import copy
import random
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import kvrecall
from kvrecall import engine
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.cache_state import LayersBefore
from kvrecall.core.errors import CacheInUseError, InterruptedPassError, ParameterError
from tests.backends.models import tiny
from tests.engine.users import METHODS, User, in_threads
from tests.one_layer import ZONES

SECONDS = 60
CHANGES: dict[str, Callable[[kvrecall.RetrievalCache, Any, Path], object]] = {
    "crop": lambda cache, model, folder: cache.crop(-1),
    "rewind": lambda cache, model, folder: cache.rewind(40),
    "return_to": lambda cache, model, folder: cache.return_to(LayersBefore.of(cache.layers, cache.get_seq_length())),
    "reset": lambda cache, model, folder: cache.reset(),
    "reserve": lambda cache, model, folder: cache.reserve(4000),
    "align": lambda cache, model, folder: cache.align(),
    "settle": lambda cache, model, folder: cache.settle(),
    "reorder_cache": lambda cache, model, folder: cache.reorder_cache(torch.tensor([0])),
    "batch_repeat_interleave": lambda cache, model, folder: cache.batch_repeat_interleave(2),
    "batch_select_indices": lambda cache, model, folder: cache.batch_select_indices(torch.tensor([0])),
    "save": lambda cache, model, folder: cache.save(folder / "session"),
    "reading_prompt": lambda cache, model, folder: cache.reading_prompt().__enter__(),
    "engine.prefill": lambda cache, model, folder: engine.prefill(model, ids(90, 3), cache),
    "cache": lambda cache, model, folder: engine.generate(model, None, ids(90, 3), cache, max_new_tokens=2),
    "forward": lambda cache, model, folder: fed(model, cache, ids(1, 3)),
}
READS: dict[str, Callable[[kvrecall.RetrievalCache], Any]] = {
    "fork": lambda cache: cache.fork(),
    "fork-as-exact": lambda cache: cache.fork(kvrecall.Exact(top_k=8, **ZONES)),
    "deepcopy": copy.deepcopy,
    "stats": lambda cache: cache.stats(),
    "mark": lambda cache: cache.mark(),
}
UNGUARDED = {
    # They read what only the end of a call changes, or are given before any token is stored.
    "batch_size", "belongs_to", "captured", "fixed_layers", "from_file", "get_mask_sizes", "get_max_length",
    "get_query_offset", "get_seq_length", "factors_differ", "has_index", "has_previous_state", "host_bytes", "is_compileable",
    "is_croppable", "is_dummy", "is_initialized", "is_linear", "is_recording_past", "is_sliding", "load", "members",
    "retrieval_layers", "rotary_kind", "searches", "sequences", "states", "fp8_rows", "valid", "wants_statistics",
    # Parts of a forward pass or of another operation, or of caches without retrieval layers.
    "activate_past_recording", "block_tables", "early_initialization", "get_conv_state", "get_recurrent_state",
    "layer_statistics", "meet", "offload", "open_pass", "prefetch", "prepare_for", "take_statistics", "undo", "update",
    "update_conv_state", "update_indexer", "update_recurrent_state",
}  # fmt: skip


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny("llama", num_hidden_layers=2)


def ids(tokens: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(3, 320, (1, tokens), generator=torch.Generator().manual_seed(seed))


def fed(model: Any, cache: kvrecall.RetrievalCache, tokens: torch.Tensor) -> torch.Tensor:
    with kvrecall.attach(model), torch.no_grad():
        return model(tokens, **cache_argument(cache)).logits[:, -1]


def filled(model: Any, name: str, tokens: int = 70) -> kvrecall.RetrievalCache:
    cache = kvrecall.RetrievalCache(model.config, METHODS[name])
    engine.prefill(model, ids(tokens), cache)
    return cache


class Gate:
    """A place where one thread waits until another one lets it go on."""

    def __init__(self) -> None:
        self.reached, self.open = threading.Event(), threading.Event()

    def __call__(self, *_: Any) -> None:
        if not self.reached.is_set():
            self.reached.set()
            assert self.open.wait(SECONDS)


@contextmanager
def beside(work: Callable[[], Any], gate: Gate) -> Iterator[list[Any]]:
    """Inside, another thread waits at the gate, in the middle of `work`; afterwards the list holds what `work` returned."""
    made: list[Any] = []
    thread = threading.Thread(target=lambda: made.append(work()), daemon=True)
    thread.start()
    assert gate.reached.wait(SECONDS)
    try:
        yield made
    finally:
        gate.open.set()
        thread.join(SECONDS)
    assert not thread.is_alive() and len(made) == 1


def in_a_pass(model: Any, cache: kvrecall.RetrievalCache, gate: Gate) -> Callable[[], Any]:
    """A call that waits in its second layer, so that the first one holds a token more."""
    cache.on_queries = lambda layer, _: gate() if layer == 1 else None
    return lambda: fed(model, cache, ids(1, 1))


def as_request(model: Any, cache: kvrecall.RetrievalCache, gate: Gate, new_tokens: int = 12) -> Callable[[], Any]:
    """A request of the engine that waits between two steps."""
    steps: list[int] = []

    def wait(count: int) -> None:
        steps.append(count)
        if len(steps) == 3:
            gate()

    given: dict[str, Any] = {"max_new_tokens": new_tokens, "temperature": 1.0, "seed": 0, "on_token": wait}
    return lambda: engine.generate(model, None, ids(70), cache, **given).sequences


def by_generate(model: Any, cache: kvrecall.RetrievalCache, gate: Gate) -> Callable[[], Any]:
    """`model.generate` that waits between two steps."""

    class Wait(LogitsProcessor):
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            if input_ids.shape[1] == 73:
                gate()
            return scores

    def work() -> torch.Tensor:
        with kvrecall.attach(model):
            prompt = ids(70)
            return model.generate(
                input_ids=prompt, attention_mask=torch.ones_like(prompt), **cache_argument(cache), max_new_tokens=12,
                do_sample=False, logits_processor=LogitsProcessorList([Wait()]),
            )  # fmt: skip

    return work


def by_prefill(model: Any, cache: kvrecall.RetrievalCache, gate: Gate) -> Callable[[], Any]:
    """A prefill that waits between two chunks."""

    def work() -> torch.Tensor:
        engine.prefill(model, ids(120), cache, chunk_tokens=16, on_progress=lambda done, _: gate() if done == 86 else None)
        return fed(model, cache, ids(1, 1))

    return work


WORKS = {"pass": in_a_pass, "request": as_request, "model.generate": by_generate, "prefill": by_prefill}


@pytest.mark.parametrize("name", ["full", "pariskv-balanced"])
@pytest.mark.parametrize("work", WORKS)
def test_what_changes_a_cache_is_refused_beside_another_thread(work: str, name: str, model: Any, tmp_path: Path) -> None:
    gate, free = Gate(), Gate()
    free.reached.set()
    want = WORKS[work](model, filled(model, name), free)()
    cache = filled(model, name)
    with beside(WORKS[work](model, cache, gate), gate) as made:
        for change, call in CHANGES.items():
            with pytest.raises(CacheInUseError, match=f"^{'cache' if change == 'forward' else change}: expected"):
                call(cache, model, tmp_path)
    assert torch.equal(made[0], want) and not list(tmp_path.iterdir())
    for call in CHANGES.values():
        call(filled(model, name), model, tmp_path)  # allowed on a cache that nobody uses


@pytest.mark.parametrize("name", ["full", "pariskv-balanced"])
@pytest.mark.parametrize("read", READS)
def test_a_copy_waits_for_the_end_of_a_pass(read: str, name: str, model: Any) -> None:
    gate, copied, twin = Gate(), threading.Event(), filled(model, name)
    want = fed(model, twin, ids(1, 1))
    cache = filled(model, name)
    with beside(in_a_pass(model, cache, gate), gate) as made:
        copies: list[Any] = []
        reader = threading.Thread(target=lambda: (copies.append(READS[read](cache)), copied.set()), daemon=True)
        reader.start()
        assert not copied.wait(0.05)
    reader.join(SECONDS)
    assert torch.equal(made[0], want) and len(copies) == 1
    if read == "stats":
        assert copies[0].total.tokens == twin.stats().total.tokens
        return
    if read == "mark":
        assert copies[0].tokens == twin.mark().tokens == 71
        return
    other = READS[read](twin)
    assert torch.equal(fed(model, copies[0], ids(1, 2)), fed(model, other, ids(1, 2)))
    assert torch.equal(fed(model, cache, ids(1, 2)), fed(model, twin, ids(1, 2)))


@pytest.mark.parametrize("name", ["full", "exact", "pariskv-balanced", "louiskv"])
def test_a_fork_between_two_steps_of_a_request_is_whole(name: str, model: Any) -> None:
    cache, gate = kvrecall.RetrievalCache(model.config, METHODS[name]), Gate()
    with beside(as_request(model, cache, gate), gate) as made:
        fork = cache.fork()
    stored, free = fork.get_seq_length(), Gate()
    free.reached.set()
    whole, alone = (kvrecall.RetrievalCache(model.config, METHODS[name]) for _ in range(2))
    assert torch.equal(as_request(model, whole, free)(), made[0])
    as_request(model, alone, free, stored - 69)()
    assert alone.get_seq_length() == stored >= 72
    prompt = made[0][:, : stored + 1]
    answers = [engine.generate(model, None, prompt, each, max_new_tokens=4).sequences for each in (fork, alone)]
    assert torch.equal(*answers)


@pytest.mark.parametrize("first", ["fork", "crop", "forward"])
def test_a_thread_that_ended_in_the_middle_of_a_pass_leaves_no_claim(first: str, model: Any) -> None:
    cache, twin = filled(model, "pariskv-balanced"), filled(model, "pariskv-balanced")

    def stop(layer: int, _: Any) -> None:
        if layer == 1:
            raise KeyboardInterrupt

    cache.on_queries = stop
    assert isinstance(in_threads([lambda: fed(model, cache, ids(1, 1))])[0], KeyboardInterrupt)
    cache.on_queries = None
    if first == "forward":
        fed(model, cache, ids(1, 1))  # attach has restored the cache
        fed(model, twin, ids(1, 1))
    elif first == "crop":
        cache.crop(-3)
        twin.crop(-3)
    assert torch.equal(fed(model, cache.fork(), ids(1, 2)), fed(model, twin.fork(), ids(1, 2)))


@pytest.mark.parametrize("read", ["fork", "forward"])
def test_a_dead_pass_inside_an_open_attach_is_undone_by_the_next_operation(read: str, model: Any) -> None:
    cache, twin = filled(model, "exact"), filled(model, "exact")

    def stop(layer: int, _: Any) -> None:
        if layer == 1:
            raise KeyboardInterrupt

    def work() -> None:
        with torch.no_grad():
            model(ids(1, 1), **cache_argument(cache))

    with kvrecall.attach(model), torch.no_grad():
        cache.on_queries = stop
        assert isinstance(in_threads([work])[0], KeyboardInterrupt)  # its thread is over; no hook has seen the exception
        cache.on_queries = None
        assert cache.running is not None and cache.running.claim.ended
        if read == "forward":
            with pytest.raises(InterruptedPassError, match="70 tokens"):
                work()
        fork = cache.fork()
        for each in (cache, fork):
            assert torch.equal(fed(model, each, ids(1, 2)), fed(model, twin.fork(), ids(1, 2)))


def test_an_operation_inside_the_pass_of_its_own_thread_is_refused(model: Any, tmp_path: Path) -> None:
    cache, twin = filled(model, "exact"), filled(model, "exact")
    refused: list[str] = []

    def inside(layer: int, _: Any) -> None:
        for change in ("crop", "reset", "reserve", "reorder_cache", "save"):
            with pytest.raises(CacheInUseError, match=f"^{change}: expected a call outside a forward pass"):
                CHANGES[change](cache, model, tmp_path)
            refused.append(change)
        with pytest.raises(CacheInUseError, match="fork: expected a call outside a forward pass"):
            cache.fork()
        cache.align()
        cache.stats()

    cache.on_queries = inside
    assert torch.equal(fed(model, cache, ids(1, 1)), fed(model, twin, ids(1, 1))) and len(refused) == 10


def test_every_public_operation_is_guarded_or_needs_no_guard() -> None:
    guarded = {name for name in dir(kvrecall.RetrievalCache) if not name.startswith("_")} - UNGUARDED
    assert guarded <= {*CHANGES, *READS}


OPERATIONS = ["fork", "stats", "crop", "reset", "reserve", "align", "save", "engine.prefill", "batch_repeat_interleave"]


@pytest.mark.parametrize("name", METHODS)
def test_threads_at_random_beside_two_requests(name: str, model: Any, tmp_path: Path) -> None:
    """Operations at random moments: the requests' answers are what they are alone, and so are those of every fork."""
    users = [User(METHODS[name], seed=seed, new_tokens=14) for seed in (1, 2)]
    want = [user.alone(model)[0] for user in users]
    caches = [kvrecall.RetrievalCache(model.config, METHODS[name]) for _ in users]
    forks: list[tuple[int, kvrecall.RetrievalCache]] = []
    over, draw, refused = threading.Event(), random.Random(name), [0]
    changed: set[int] = set()  # caches that were free, because their request had ended, and that now hold something else

    def others() -> None:
        while not over.wait(draw.uniform(0, 0.004)):
            number, what = draw.randrange(2), draw.choice(OPERATIONS)
            if number in changed or caches[number].get_seq_length() <= users[number].ids.shape[1]:  # not in its decode steps
                continue
            try:
                if what == "fork":
                    forks.append((number, caches[number].fork()))
                elif what == "stats":
                    caches[number].stats()
                else:
                    CHANGES[what](caches[number], model, tmp_path)
                    changed.update([number] if what not in ("reserve", "align", "save") else [])
            except CacheInUseError:
                refused[0] += 1
            except ParameterError as error:  # a captured or otherwise refused step is an error by name, too
                raise AssertionError from error

    requests = [user.submit(model, cache) for user, cache in zip(users, caches, strict=True)]
    hold = threading.Thread(target=others, daemon=True)
    hold.start()
    made = in_threads([request.result for request in requests])
    over.set()
    hold.join(SECONDS)
    assert [each.new_tokens[0] for each in made] == want
    for number, fork in forks[:6]:
        new = fork.get_seq_length() - users[number].ids.shape[1]
        if new == len(want[number]):  # taken behind the last step
            continue
        plain = kvrecall.RetrievalCache(model.config, METHODS[name])
        replace(users[number], new_tokens=new + 1).alone(model, plain)
        logits = [fed(model, each, torch.tensor([want[number][new : new + 1]])) for each in (fork, plain)]
        torch.testing.assert_close(*logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", ["full", "exact", "pariskv-balanced"])
@pytest.mark.parametrize("change", ["reorder_cache", "batch_select_indices"])
@pytest.mark.parametrize("order", [[0, -1, 1], [3, 0, 0], []], ids=["negative", "out-of-range", "none"])
def test_an_order_of_other_sequences_is_refused(order: list[int], change: str, name: str, model: Any) -> None:
    cache = kvrecall.RetrievalCache(model.config, METHODS[name])
    engine.prefill(model, torch.cat([ids(50, seed) for seed in range(3)]), cache)
    want = fed(model, cache.fork(), torch.full((3, 1), 5))
    with pytest.raises(ParameterError, match="sequences: expected one or more of the cache's sequences, 0 to 2"):
        getattr(cache, change)(torch.tensor(order, dtype=torch.int64))
    assert torch.equal(fed(model, cache.fork(), torch.full((3, 1), 5)), want)
    getattr(cache, change)(torch.tensor([2, 1, 1]))
    torch.testing.assert_close(fed(model, cache, torch.full((3, 1), 5)), want[[2, 1, 1]], atol=1e-5, rtol=1e-5)
