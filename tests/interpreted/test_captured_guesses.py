"""Captured steps of several tokens: what single steps give, whatever is taken of them."""

from __future__ import annotations

from itertools import count
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall import engine
from kvrecall.core.errors import CaptureError
from kvrecall.core.structs import AttentionParams
from kvrecall.layer.pipeline import decode_step, prefill_layer
from tests.backends.models import tiny
from tests.engine.users import User
from tests.interpreted.test_recorded import METHODS as RECORDED
from tests.interpreted.test_recorded import SMALL, prompt
from tests.layers import DIM, ZONES, left_padded, state, tokens

pytest.importorskip("triton", reason="Triton is only there on Linux")
from kvrecall.backends.transformers.capture.runner import CapturedSteps
from kvrecall.engine import steps
from kvrecall.engine.lookup import LookupDecoding
from kvrecall.engine.loop import loop_of
from kvrecall.index.table import bucket_length
from kvrecall.layer.slots.layers import Layers, SlotLease
from tests.interpreted.launched import Launched, without_gpu

pytestmark = pytest.mark.usefixtures("several_blocks")

EXACT: dict[str, Any] = ZONES | {"top_k": 6, "weight_dtype": "float32"}  # the interpreter rounds to bf16 in a way of its own
METHODS = {
    "products": kvrecall.ParisKV(stage1="product", gqa="mean_softmax", fetch="direct:reuse=true", **EXACT),
    "balanced": kvrecall.methods.get("pariskv-balanced", **EXACT),
    "page-means": kvrecall.methods.get("pariskv-balanced", estimate="page-means:page_tokens=4", **EXACT),
    "full": kvrecall.Full(),
}
WIDTH = 3


@pytest.mark.parametrize("name", METHODS)
def test_steps_and_what_is_left_behind_are_those_of_single_tokens(name: str) -> None:
    """Of two sequences, whose zones grow inside what is fed and at the end of what is taken."""
    method, params = METHODS[name], AttentionParams(DIM**-0.5)
    plain, other = (state(method, 2) for _ in range(2))
    lengths = [90, 61]
    for layer in (plain, other):
        prefill_layer(layer, *tokens(0, 2, max(lengths)), left_padded(lengths), params)
    for number in range(5):
        new = tokens(500 + number, 2, 1)
        decode_step(plain, *new, None, params), decode_step(other, *new, None, params)
    joined = SlotLease([other], [0, 1], 64)
    layers = Layers([other], 2, bucket_length(joined.behind_sink), WIDTH)
    layers.join(joined)
    now, fed, limited = torch.arange(1, WIDTH + 1), 0, 0
    for number, wanted in enumerate((2, 0, 3, 3)):
        most = layers.most_taken([0, 1])
        taken, limited = min(wanted, most), limited + (wanted > most)
        right, wrong = tokens(1000 + 10 * fed, 2, WIDTH), tokens(9000 + number, 2, WIDTH)
        new = [torch.cat([a[:, :, :taken], b[:, :, taken:]], 2) for a, b in zip(right, wrong, strict=True)]
        layers.prepare()
        out = layers.all[0].step(new[0], new[1], new[2], now, params)
        now += WIDTH
        layers.advance(taken)
        for t in range(taken):
            expected = decode_step(plain, *(x[:, :, t : t + 1] for x in new), None, params)
            torch.testing.assert_close(out[:, :, t : t + 1], expected, atol=2e-6, rtol=2e-6)
        fed += taken
    assert limited == (0 if name == "full" else 1), "a zone grew before the end of what was wanted"
    layers.leave(joined)
    for b in range(2):
        assert other.store.zones(b) == plain.store.zones(b)
        assert torch.equal(other.store.resident.view(b), plain.store.resident.view(b))
        assert all(torch.equal(x, y) for x, y in zip(other.store.host[b].blocks(), plain.store.host[b].blocks(), strict=True))
        if name != "full":
            assert torch.equal(other.held[b].ids, plain.held[b].ids)
    for counter in ("steps", "searches", "attended_tokens", "attended_rows", "retrieved_tokens", "estimated_units"):
        assert getattr(other.stats, counter) == getattr(plain.stats, counter), counter
    new = tokens(3000, 2, 1)  # and the pipeline can go on with it
    torch.testing.assert_close(decode_step(other, *new, None, params), decode_step(plain, *new, None, params))


@pytest.mark.parametrize(
    ("method", "told"),
    [
        (kvrecall.ParisKV(**EXACT), "collisions count"),
        (kvrecall.ParisKV(stage1="product", trigger="semantic-boundary:threshold=0.0", **EXACT), "remembers queries"),
        (kvrecall.Exact(top_k=6, **ZONES), "counts its zones on the device"),
        (kvrecall.ParisKV(stage1="product", **EXACT | {"local_tokens": 2}), "a window of 2 tokens"),
    ],
)
def test_layers_that_cannot_take_back_tokens_are_refused(method: kvrecall.Method, told: str) -> None:
    layer = state(method, 1)
    prefill_layer(layer, *tokens(0, 1, 90), None, AttentionParams(DIM**-0.5))
    joined = SlotLease([layer], [0], 8)
    with pytest.raises(CaptureError, match=told):
        Layers([layer], 1, bucket_length(joined.behind_sink), WIDTH)
    joined.undo()


@pytest.fixture
def look_up(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Requests are captured though the model is on a CPU; grows by the taken tokens of each captured step."""
    taken: list[int] = []
    without_gpu(monkeypatch)
    monkeypatch.setattr(Launched, "recorded_steps", 0)

    def capturing(args: Any) -> CapturedSteps:
        width = 1 + (args.config.prompt_lookup_num_tokens or 0)
        return CapturedSteps(args.model, args.cache, False, width=width)

    def take(self: Any, tokens: int, own: Any = Launched.take) -> None:
        taken.append(tokens)
        own(self, tokens)

    monkeypatch.setattr(steps, "_captured_steps", capturing)
    monkeypatch.setattr(Launched, "take", take)
    return taken


def guess_from(answer: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Guesses come from the answer, now and then with a wrong token, or none at all."""
    number = count()

    def look_up(self: LookupDecoding) -> None:
        at, kind = len(self.steps), next(number) % 5
        guess = answer[at : at + 3] if kind != 4 else []
        self._guess = [token if i != kind else (token + 1) % 90 for i, token in enumerate(guess)]

    monkeypatch.setattr(LookupDecoding, "_look_up", look_up)


@pytest.mark.parametrize("name", ["sphere", "balanced", "full"])
def test_looked_up_answers_are_the_plain_ones(name: str, look_up: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, method = tiny("llama", **SMALL), RECORDED[name]
    model.generation_config.eos_token_id = None
    ids = prompt(44)
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_captured_steps", lambda args: None)
        plain = kvrecall.RetrievalCache(model.config, method)
        expected = engine.generate(model, None, ids, plain, max_new_tokens=16).new_tokens
    guess_from(expected[0], monkeypatch)
    cache = kvrecall.RetrievalCache(model.config, method)
    made = engine.generate(model, None, ids, cache, max_new_tokens=16, prompt_lookup_num_tokens=3)
    assert made.new_tokens == expected
    assert Launched.recorded_steps == 1 and {1, 2, 3} <= set(look_up) <= {1, 2, 3, 4}
    assert not cache.captured and cache.get_seq_length() == plain.get_seq_length() == ids.shape[1] + 15
    held, wanted = cache.tokens.ids(), plain.tokens.ids()
    assert held is not None and wanted is not None and torch.equal(held, wanted)
    for ours, theirs in zip(cache.retrieval_layers, plain.retrieval_layers, strict=True):
        assert ours.state is not None and theirs.state is not None
        assert ours.state.store.zones(0) == theirs.state.store.zones(0)
    more = torch.cat([made.sequences, prompt(3, seed=9)], 1)  # a second turn, of single steps
    again = [engine.generate(model, None, more, one, max_new_tokens=4).new_tokens for one in (cache, plain)]
    assert again[0] == again[1]


def test_a_request_beside_it_interrupts_captured_guesses(look_up: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(steps, "_ALONE_STEPS", 1)
    model, method, ids = tiny("llama", **SMALL), RECORDED["sphere"], prompt(44)
    model.generation_config.eos_token_id = None
    other = User(method, (36,), 3, seed=1, more={"temperature": 0.0})
    with monkeypatch.context() as patch:
        patch.setattr(steps, "_captured_steps", lambda args: None)
        expected = engine.generate(model, None, ids, method, max_new_tokens=16).new_tokens
        beside = other.alone(model)
    guess_from(expected[0], monkeypatch)
    cache = kvrecall.RetrievalCache(model.config, method)
    request = engine.Engine.of(model).submit(None, ids, cache, max_new_tokens=16, prompt_lookup_num_tokens=3)
    answer = iter(request)
    for _ in range(4):
        next(answer)
    assert cache.captured and len(loop_of(model)._active) == 1
    assert other.submit(model).result().new_tokens == beside
    before = len(look_up)
    assert request.result().new_tokens == expected and len(look_up) > before > 0


def test_a_request_that_is_cancelled_keeps_what_was_taken(look_up: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = tiny("llama", **SMALL), prompt(44)
    model.generation_config.eos_token_id = None
    cache = kvrecall.RetrievalCache(model.config, RECORDED["sphere"])
    expected = engine.generate(model, None, ids, RECORDED["sphere"], max_new_tokens=16).new_tokens[0]
    guess_from(expected, monkeypatch)
    request = engine.Engine.of(model).submit(None, ids, cache, max_new_tokens=16, prompt_lookup_num_tokens=3)
    for number, _ in enumerate(request):
        if number == 7:
            break
    request.cancel()
    held = cache.tokens.ids()
    assert look_up and held is not None and held.shape[1] == cache.get_seq_length()
    assert held[0, ids.shape[1] :].tolist() == expected[: held.shape[1] - ids.shape[1]]
    assert not cache.captured


def test_a_method_whose_tokens_cannot_be_taken_back_is_looked_up_uncaptured(
    look_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a warning; steps of single tokens are captured all the same."""
    model, method, ids = tiny("llama", **SMALL), RECORDED["segments"], prompt(44)
    expected = engine.generate(model, None, ids, method, max_new_tokens=6).new_tokens
    with pytest.warns(RuntimeWarning, match="decoding uncaptured, with prompt_lookup_num_tokens: .*counts its zones"):
        made = engine.generate(model, None, ids, method, max_new_tokens=6, prompt_lookup_num_tokens=2)
    assert made.new_tokens == expected and not look_up
    caches = [kvrecall.RetrievalCache(model.config, method) for _ in range(2)]
    for cache in caches:
        engine.prefill(model, ids[:, :-1], cache)
    with pytest.raises(CaptureError, match=r"a step of 3 tokens .*counts its zones"):
        CapturedSteps(model, caches[0], required=True, width=3).guess(5, [6], 8)
    answers = [engine.generate(model, None, ids, caches[0], max_new_tokens=6).new_tokens]
    assert Launched.recorded_steps == 1  # by the first answer
    monkeypatch.setattr(steps, "_captured_steps", lambda args: None)
    answers.append(engine.generate(model, None, ids, caches[1], max_new_tokens=6).new_tokens)
    assert answers[0] == answers[1]


def test_room_that_runs_out_is_made_anew(look_up: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    model, method, ids = tiny("llama", **SMALL), RECORDED["sphere"], prompt(44)
    model.generation_config.eos_token_id = None
    expected = engine.generate(model, None, ids, method, max_new_tokens=18).new_tokens
    guess_from(expected[0], monkeypatch)
    guess, step = CapturedSteps.guess, CapturedSteps.step
    monkeypatch.setattr(CapturedSteps, "guess", lambda self, known, guesses, room: guess(self, known, guesses, 5))
    monkeypatch.setattr(CapturedSteps, "step", lambda self, ids, room: step(self, ids, 5))
    assert engine.generate(model, None, ids, method, max_new_tokens=18, prompt_lookup_num_tokens=3).new_tokens == expected
    assert sum(look_up) > 8


@pytest.mark.parametrize(
    ("family", "name", "guesses"),
    [
        ("llama", "sphere", 0), ("llama", "balanced", 0), ("llama", "segments", 0), ("gemma2", "sphere", 0),
        ("llama", "sphere", 3), ("llama", "balanced", 3),
    ],
)  # fmt: skip
def test_captured_drafts_are_checked(
    family: str, name: str, guesses: int, look_up: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By full attention, which the recorded step goes on behind."""
    model, method, ids = tiny(family, **SMALL | {"num_hidden_layers": 2}), RECORDED[name], prompt(44)
    model.generation_config.eos_token_id = None
    expected = engine.generate(model, None, ids, kvrecall.Full(), max_new_tokens=16, capture=False).new_tokens
    if guesses:
        guess_from(expected[0], monkeypatch)
    cache = kvrecall.RetrievalCache(model.config, method)
    more: dict[str, Any] = {"prompt_lookup_num_tokens": guesses} if guesses else {}
    made = engine.generate(model, None, ids, cache, max_new_tokens=16, exact=True, **more)
    assert made.new_tokens == expected and made.drafts is not None
    assert made.drafts.checks + made.drafts.accepted == 15 and Launched.recorded_steps >= 1
    assert not cache.captured and cache.get_seq_length() == 59 and cache.tokens.exact(99) == 99
