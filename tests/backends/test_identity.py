"""Who answers: rows belong to the weights and adapters that computed them. Others are refused by name, the same go on."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import kvrecall
from kvrecall import RetrievalCache, attach, engine
from kvrecall.backends.transformers import weights
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.capture.structure import StepKey
from kvrecall.backends.transformers.fingerprint import config_digest, fingerprint_of, read_fingerprint
from kvrecall.cache.session_folder import read_index, write_index
from kvrecall.core.errors import CacheWriterError, ParameterError, SessionError
from kvrecall.core.private_folder import PrivateFolder
from tests.backends.models import tiny
from tests.tiny import WORDS, tiny_tokenizer

METHOD = kvrecall.Exact(top_k=10_000, sink_tokens=4, local_tokens=16, update_interval=8, full_attention_threshold=0)
KINDS = {"lora": 5, "loha": 4, "ia3": 3}  # of the changes below; IA3 has no scaling
PROMPT = torch.randint(5, len(WORDS), (1, 60), generator=torch.Generator().manual_seed(0))
WHOLE = torch.cat([PROMPT, PROMPT[:, 3:8]], 1)


@pytest.fixture
def model() -> Any:
    return tiny("llama", num_hidden_layers=2, vocab_size=len(WORDS), max_position_embeddings=2048, initializer_range=0.3)


def adapter(kind: str) -> Any:
    """Adapters on two projections that change every answer."""
    import peft

    both = ["k_proj", "v_proj"]
    if kind == "ia3":
        return peft.IA3Config(target_modules=both, feedforward_modules=[], init_ia3_weights=False)
    if kind == "loha":
        return peft.LoHaConfig(target_modules=both, r=4, init_weights=False)
    return peft.LoraConfig(target_modules=both, r=4, lora_alpha=32, init_lora_weights=False)


def wrapped(model: Any, kind: str = "lora") -> Any:
    """A PEFT model with adapters "one", which is in use, and "two"."""
    from peft import get_peft_model

    torch.manual_seed(1)
    made = get_peft_model(model, adapter(kind), adapter_name="one")
    made.add_adapter("two", adapter(kind))
    return made.eval()


def scaled(model: Any, by: float) -> None:
    for part in model.modules():
        if hasattr(part, "scale_layer"):
            part.scale_layer(by)


CHANGES: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "switched": (lambda m: m.set_adapter("two"), lambda m: m.set_adapter("one")),
    "off": (lambda m: m.base_model.disable_adapter_layers(), lambda m: m.base_model.enable_adapter_layers()),
    "merged": (lambda m: m.merge_adapter(), lambda m: m.unmerge_adapter()),
    "scaled": (lambda m: scaled(m, 2.0), lambda m: scaled(m, 0.5)),
    "both": (lambda m: m.base_model.set_adapter(["one", "two"]), lambda m: m.set_adapter("one")),
}
"""What changes the answers of a PEFT model, and its opposite."""
CASES = [(kind, change) for kind, count in KINDS.items() for change in list(CHANGES)[:count]]


def read(model: Any) -> RetrievalCache:
    cache = RetrievalCache(model.config, METHOD)
    engine.prefill(model, PROMPT, cache)
    return cache


def call(model: Any, cache: RetrievalCache, ids: Tensor = WHOLE[:, 60:]) -> Tensor:
    with torch.no_grad(), attach(model):
        return model(input_ids=ids, **cache_argument(cache), use_cache=True).logits[:, -1]


def answer(model: Any, cache: RetrievalCache) -> list[int]:
    return engine.generate(model, None, WHOLE, cache, max_new_tokens=6).new_tokens[0]


@pytest.mark.parametrize(("kind", "change"), CASES)
def test_a_cache_and_a_session_belong_to_the_adapter_that_filled_them(
    model: Any, kind: str, change: str, tmp_path: Path
) -> None:
    there, back = CHANGES[change]
    model = wrapped(model, kind)
    cache, before = read(model), fingerprint_of(model)
    cache.save(tmp_path / "s")
    wanted = answer(model, cache.fork())
    there(model)
    assert fingerprint_of(model) != before and fingerprint_of(model) == read_fingerprint(model)
    fresh = RetrievalCache.load(tmp_path / "s", model.config)
    with pytest.raises(SessionError, match="expected the model that it was saved with"):
        RetrievalCache.load(tmp_path / "s", model.config, model=model)
    with pytest.raises(SessionError, match="expected the model that it was saved with"):
        call(model, fresh)
    for use in (call, answer, lambda m, c: engine.prefill(m, WHOLE, c)):
        with pytest.raises(CacheWriterError, match=r"expected what computed its tokens .* with adapter 'one'"):
            use(model, cache)
    assert cache.get_seq_length() == 60
    cache.save(tmp_path / "later")  # the cache knows that "one" filled it
    back(model)
    if change == "merged":  # merging rounds
        return
    assert answer(model, cache) == wanted
    for folder in ("s", "later"):
        loaded = RetrievalCache.load(tmp_path / folder, model.config, model=model)
        there(model)
        with pytest.raises(CacheWriterError):
            call(model, loaded)
        back(model)
        assert answer(model, loaded) == wanted


@pytest.mark.parametrize("change", ["switched", "off"])
def test_ask_refuses_a_document_that_another_adapter_read(model: Any, change: str) -> None:
    there, back = CHANGES[change]
    model, tokenizer = wrapped(model), tiny_tokenizer()
    document = engine.Document.of(model, tokenizer, "the red boat . " * 20, method=METHOD)
    first = document.ask("the harbour", max_new_tokens=5)[0].tokens
    there(model)
    with pytest.raises(CacheWriterError):
        document.ask("the harbour", max_new_tokens=5)
    with pytest.raises(CacheWriterError):
        kvrecall.ask(model, tokenizer, document.cache, "the harbour", max_new_tokens=5)
    back(model)
    assert document.ask("the harbour", max_new_tokens=5)[0].tokens == first


def test_a_request_in_flight_ends_when_its_adapter_goes(model: Any) -> None:
    model = wrapped(model)
    wanted = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        wanted[name] = answer(model, RetrievalCache(model.config, METHOD))
    assert wanted["one"] != wanted["two"]
    model.set_adapter("one")
    running = engine.Engine.of(model).submit(None, WHOLE, METHOD, max_new_tokens=6)
    first = next(iter(running))
    model.set_adapter("two")
    other = engine.Engine.of(model).submit(None, WHOLE, METHOD, max_new_tokens=6)
    with pytest.raises(CacheWriterError, match=r"with adapter 'one'.* got .* with adapter 'two'"):
        running.result()
    assert first == wanted["one"][:1] and other.result().new_tokens[0] == wanted["two"]


def test_the_same_computation_goes_on(model: Any, tmp_path: Path) -> None:
    """Of a bare model and of one whose adapters are off; of an adapter under another name, or beside one more."""
    cache, wanted, bare = read(model), answer(model, RetrievalCache(model.config, METHOD)), fingerprint_of(model)
    cache.save(tmp_path)
    adapted = wrapped(model)
    with adapted.disable_adapter():
        assert fingerprint_of(adapted) == bare == fingerprint_of(model)
        assert answer(adapted, cache) == wanted
        assert answer(adapted, RetrievalCache.load(tmp_path, model.config, model=adapted)) == wanted
    with pytest.raises(CacheWriterError, match="with no adapter"):
        call(adapted, cache)
    own = fingerprint_of(adapted)
    adapted.add_adapter("c", adapter("lora"))
    adapted.add_adapter("d", adapter("lora"))
    states = {name: deepcopy(value) for name, value in adapted.state_dict().items() if ".one." in name}
    adapted.load_state_dict({name.replace(".one.", ".d."): value for name, value in states.items()}, strict=False)
    assert fingerprint_of(adapted) == own
    adapted.set_adapter("d")
    assert fingerprint_of(adapted) == own


def test_two_copies_are_one_model(model: Any) -> None:
    cache, other = read(model), deepcopy(model)
    assert fingerprint_of(model) == fingerprint_of(other)
    assert torch.equal(call(model, cache.fork()), call(other, cache.fork()))


@pytest.mark.parametrize("change", ["in place", "another tensor", "another module"])
def test_other_weights(model: Any, change: str) -> None:
    cache, part = read(model), model.model.layers[1].self_attn
    if change == "in place":
        with torch.no_grad():
            part.k_proj.weight.mul_(-1)
    elif change == "another tensor":
        part.k_proj.weight = torch.nn.Parameter(-part.k_proj.weight.detach())
    else:
        part.k_proj = deepcopy(model.model.layers[0].self_attn.k_proj)
    with pytest.raises(CacheWriterError):
        call(model, cache)
    cache.reset()
    call(model, cache, WHOLE)


def test_weights_written_past_pytorch_are_noticed_by_sessions(model: Any, tmp_path: Path) -> None:
    cache = read(model)
    cache.save(tmp_path / "before")
    model.model.layers[1].self_attn.k_proj.weight.data.mul_(-1)
    with pytest.raises(SessionError, match=r"some that were written through tensor\.data"):
        cache.save(tmp_path / "after")
    with pytest.raises(SessionError, match="expected the model that it was saved with"):
        RetrievalCache.load(tmp_path / "before", model.config, model=model)


def test_a_step_reads_no_weights(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also not after switching to and fro between adapters that were in use before."""
    model = wrapped(model)
    caches = {}
    for name in ("one", "two"):
        model.set_adapter(name)
        caches[name] = read(model)

    def fail(decoder: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(weights, "digest", fail)
    for name in ("one", "two", "two", "one"):
        model.set_adapter(name)
        call(model, caches[name])


def test_recorded_steps_are_replayed_under_their_adapter_only(model: Any) -> None:
    model = wrapped(model)
    inner, keys = model.get_base_model(), set()
    for there, back in [(lambda m: None, lambda m: None), *CHANGES.values()]:
        there(model)
        keys.add(StepKey.of(inner, False, 1))
        back(model)
    assert len(keys) == 1 + len(CHANGES)
    assert StepKey.of(inner, False, 1) in keys


class InBuffer(torch.nn.Module):
    """A linear layer with its weight in a buffer, as GPTQ and AWQ have it."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.register_buffer("qweight", weight.detach().clone())

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.qweight.T


def in_buffers(model: Any) -> Any:
    for layer in model.model.layers:
        for name, part in list(layer.self_attn.named_children()):
            setattr(layer.self_attn, name, InBuffer(part.weight))
    return model


def packed(model: Any) -> Any:
    return torch.ao.quantization.quantize_dynamic(model, {torch.nn.Linear}, dtype=torch.qint8)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("form", [in_buffers, packed])
def test_weights_that_are_no_parameters(model: Any, form: Callable[[Any], Any], tmp_path: Path) -> None:
    other = deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(-1)
    own, again, other = (form(deepcopy(each)) for each in (model, model, other))
    cache = read(own)
    cache.save(tmp_path)
    assert answer(again, RetrievalCache.load(tmp_path, again.config, model=again)) == answer(own, cache)
    with pytest.raises(SessionError, match="expected the model that it was saved with"):
        RetrievalCache.load(tmp_path, other.config, model=other)


def offloaded(model: Any, folder: Path) -> Any:
    from accelerate import dispatch_model

    places = {"model.embed_tokens": "cpu", "model.layers.0": "cpu", "model.layers.1": "disk", "model.norm": "cpu"}
    places |= {"model.rotary_emb": "cpu", "lm_head": "cpu"}
    return dispatch_model(model, places, main_device="cpu", offload_dir=folder, force_hooks=True)


def test_offloaded_weights_are_compared(model: Any, tmp_path: Path) -> None:
    plain, other = deepcopy(model), deepcopy(model)
    with torch.no_grad():
        other.model.layers[1].self_attn.k_proj.weight.mul_(-1)
    model, other = offloaded(model, tmp_path / "own"), offloaded(other, tmp_path / "other")
    assert next(model.model.layers[1].parameters()).is_meta and fingerprint_of(model) == fingerprint_of(plain)
    cache = read(model)
    cache.save(tmp_path / "s")
    wanted = answer(model, cache)
    for same in (model, plain):
        assert answer(same, RetrievalCache.load(tmp_path / "s", same.config, model=same)) == wanted
    with pytest.raises(SessionError, match="expected the model that it was saved with"):
        RetrievalCache.load(tmp_path / "s", other.config, model=other)


def test_a_model_that_is_offloaded_whole(model: Any, tmp_path: Path) -> None:
    from accelerate import cpu_offload

    plain, whole = deepcopy(model), cpu_offload(model, execution_device=torch.device("cpu"))
    assert whole.device.type == "meta"
    cache = RetrievalCache(whole.config, METHOD)
    call(whole, cache, PROMPT)
    cache.save(tmp_path)
    assert torch.equal(call(whole, RetrievalCache.load(tmp_path, whole.config, model=whole)), call(plain, cache))
    for use in (
        lambda: engine.generate(whole, None, PROMPT, METHOD, max_new_tokens=2),
        lambda: engine.prefill(whole, PROMPT, RetrievalCache(whole.config, METHOD)),
        lambda: kvrecall.ask(whole, tiny_tokenizer(), "the red boat", "the boat", method=METHOD, max_new_tokens=2),
    ):
        with pytest.raises(ParameterError, match="got 'one that accelerate offloads whole'"):
            use()


def test_weights_that_cannot_be_compared_make_no_session(model: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = read(model)
    cache.save(tmp_path)
    other = deepcopy(model)
    monkeypatch.setattr(weights, "digest", lambda decoder: None)  # as for weights that are sharded over processes
    with pytest.raises(SessionError, match="expected weights that can be compared"):
        RetrievalCache.load(tmp_path, other.config, model=other)
    with pytest.raises(SessionError, match="expected weights that can be compared"):
        read(other).save(tmp_path / "other")


def test_sessions_of_earlier_releases(model: Any, tmp_path: Path) -> None:
    """They are compared by the rule that made them; what it cannot tell apart is refused with that reason."""
    cache = read(model)
    cache.save(tmp_path)
    wanted, (session, _) = answer(model, cache), read_index(tmp_path)
    old = session.model.model_copy(update={"fingerprint": 1, "config": config_digest(model.config, 1)})
    with PrivateFolder(tmp_path) as folder:
        write_index(folder, session.model_copy(update={"model": old}))
    loaded = RetrievalCache.load(tmp_path, model.config, model=model)
    assert answer(model, loaded) == wanted
    loaded.save(tmp_path / "again")
    assert read_index(tmp_path / "again")[0].model.fingerprint == 2
    with pytest.raises(SessionError, match="An earlier release saved it, which compared less"):
        RetrievalCache.load(tmp_path, model.config, model=wrapped(model))


@pytest.mark.parametrize("kind", ["PromptTuningConfig", "PrefixTuningConfig"])
def test_learned_tokens_before_the_prompt_are_refused(model: Any, kind: str, tmp_path: Path) -> None:
    import peft

    cache = read(model)
    cache.save(tmp_path)
    learned = peft.get_peft_model(model, getattr(peft, kind)(task_type="CAUSAL_LM", num_virtual_tokens=3)).eval()
    for use in (
        lambda: call(learned, RetrievalCache(model.config, METHOD)),
        lambda: answer(learned, RetrievalCache(model.config, METHOD)),
        lambda: engine.prefill(learned, PROMPT, RetrievalCache(model.config, METHOD)),
        lambda: kvrecall.ask(learned, tiny_tokenizer(), "the red boat", "the boat", method=METHOD, max_new_tokens=2),
        lambda: RetrievalCache.load(tmp_path, model.config, model=learned),
    ):
        with pytest.raises(ParameterError, match="expected one that reads the prompt's tokens alone"):
            use()


def test_weights_that_cannot_be_read_are_told_apart_by_writes(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on processes that share them: two unknown hashes are not taken for one model."""
    monkeypatch.setattr(weights, "digest", lambda decoder: None)
    own = deepcopy(model)
    cache = read(own)
    answer(own, cache)
    with torch.no_grad():
        own.model.layers[0].self_attn.k_proj.weight.mul_(1.5)
    held = cache.get_seq_length()
    with pytest.raises(CacheWriterError):
        answer(own, cache)
    assert cache.get_seq_length() == held
