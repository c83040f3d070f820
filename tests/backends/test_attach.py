"""`attach` belongs to a model and a call: contexts overlap in any order and thread; what does not retrieve is untouched."""

from __future__ import annotations

import copy
import gc
import sys
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from transformers import AttentionInterface, DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache
from transformers.masking_utils import AttentionMaskInterface

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.rotary import rotaries_of
from kvrecall.core import errors
from tests.backends.models import SMALL, tiny
from tests.one_layer import ZONES

COVERING = kvrecall.ParisKV(top_k=10_000, **ZONES)


def ids(tokens: int = 60, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 320, (1, tokens), generator=torch.Generator().manual_seed(seed))


def llama(seed: int = 0, **changes: Any) -> Any:
    torch.manual_seed(seed)
    model = LlamaForCausalLM(LlamaConfig(**{**SMALL, "num_hidden_layers": 1, **changes})).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                weight.mul_(4)
    model.generation_config.eos_token_id = None
    return model


def answer(model: Any, prompt: torch.Tensor, cache: Any = None, new_tokens: int = 6, **call: Any) -> torch.Tensor:
    given = {} if cache is None else cache_argument(cache)
    mask = torch.ones_like(prompt)
    return model.generate(prompt, attention_mask=mask, max_new_tokens=new_tokens, do_sample=False, **given, **call)


def new_cache(model: Any) -> kvrecall.RetrievalCache:
    return kvrecall.RetrievalCache(model.config, COVERING)


def is_untouched(model: Any) -> bool:
    hooks = [h for part in model.modules() for h in (part._forward_hooks, part._forward_pre_hooks) if h]
    hooks += [part for part in model.modules() if {"_call_impl", "forward", "generate", "_prefill"} & vars(part).keys()]
    names = AttentionInterface._global_mapping, AttentionMaskInterface._global_mapping
    return model.config._attn_implementation == "sdpa" and not hooks and not any("kvrecall" in name for name in names)


@pytest.fixture(autouse=True)
def quick_switches() -> Iterator[None]:
    """Threads change places often, so that races show."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


class TestOfAModel:
    def test_another_model_is_attached(self) -> None:
        attached, other = llama(0), llama(1)
        cache = new_cache(other)
        with kvrecall.attach(attached), pytest.raises(errors.NotAttachedError):
            answer(other, ids(), cache)
        assert cache.get_seq_length() == 0
        with kvrecall.attach(other):
            assert torch.equal(answer(other, ids(), cache), answer(other, ids()))

    def test_two_models_share_a_config_object(self) -> None:
        attached = llama(0)
        torch.manual_seed(7)
        other = LlamaForCausalLM(attached.config).eval()
        with kvrecall.attach(attached):
            with pytest.raises(errors.NotAttachedError):
                answer(other, ids(), new_cache(other))
            assert torch.equal(answer(attached, ids(), new_cache(attached)), answer(attached, ids()))

    def test_a_deep_copy_of_an_attached_model_is_not_attached(self) -> None:
        model = llama()
        with kvrecall.attach(model):
            twin = copy.deepcopy(model)
            with pytest.raises(errors.NotAttachedError):
                answer(twin, ids(), new_cache(twin))

    def test_a_deep_copy_computes_with_its_own_weights(self) -> None:
        """Also where its rotary embedding changes with the length, which is wrapped, too."""
        model = llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0})
        with kvrecall.attach(model), torch.no_grad():
            twin = copy.deepcopy(model)
            want = model(ids()).logits
            assert torch.equal(twin(ids()).logits, want)
            twin.lm_head.weight.zero_()
            assert not twin(ids()).logits.any() and torch.equal(model(ids()).logits, want)
            assert torch.equal(answer(twin, ids()), torch.cat([ids(), torch.zeros(1, 6, dtype=torch.int64)], 1))
        assert is_untouched(model)

    def test_tensors_of_nobody(self) -> None:
        model = llama()
        cache = new_cache(model)
        with kvrecall.attach(model), pytest.raises(errors.NotAttachedError):
            cache.update(torch.zeros(1, 2, 5, 64), torch.zeros(1, 2, 5, 64), 0)

    def test_a_base_model_called_by_itself(self) -> None:
        model, cache = llama(), None
        with kvrecall.attach(model), torch.no_grad():
            cache = new_cache(model)
            got = model.model(ids(), **cache_argument(cache)).last_hidden_state
        torch.testing.assert_close(got, model.model(ids()).last_hidden_state, atol=1e-4, rtol=1e-4)
        assert cache.get_seq_length() == 60

    def test_a_wrapper_such_as_peft_makes(self) -> None:
        class Wrapper(torch.nn.Module):
            def __init__(self, model: Any) -> None:
                super().__init__()
                self.base_model = torch.nn.ModuleDict({"model": model})

        model = llama()
        with kvrecall.attach(Wrapper(model)):
            assert torch.equal(answer(model, ids(), new_cache(model)), answer(model, ids()))


class TestOrder:
    def test_contexts_that_do_not_end_in_reverse_order(self) -> None:
        model = llama()
        want = answer(model, ids())
        first, second = kvrecall.attach(model), kvrecall.attach(model)
        first.__enter__()
        second.__enter__()
        first.__exit__(None, None, None)
        assert torch.equal(answer(model, ids(), new_cache(model)), want)
        second.__exit__(None, None, None)
        assert is_untouched(model)
        assert torch.equal(answer(model, ids()), want)

    def test_nested_and_in_an_exit_stack(self) -> None:
        model, other = llama(0), llama(1)
        with ExitStack() as stack:
            for each in (model, other, model):
                stack.enter_context(kvrecall.attach(each))
            with kvrecall.attach(model):
                pass
            for each in (model, other):
                assert torch.equal(answer(each, ids(), new_cache(each)), answer(each, ids()))
        assert is_untouched(model) and is_untouched(other)

    @pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt, SystemExit, GeneratorExit])
    def test_exceptions_in_the_middle_of_a_pass(self, error: type[BaseException]) -> None:
        model = llama(num_hidden_layers=2)
        cache = new_cache(model)

        def stop(layer: int, queries: torch.Tensor) -> None:
            if layer == 1:
                raise error

        cache.on_queries = stop
        with pytest.raises(error), kvrecall.attach(model):
            answer(model, ids(), cache)
        assert is_untouched(model)
        assert [layer.get_seq_length() for layer in cache.retrieval_layers] == [0, 0]
        cache.on_queries = None
        with kvrecall.attach(model):
            assert torch.equal(answer(model, ids(), cache), answer(model, ids()))

    def test_an_interrupt_behind_the_last_layer_keeps_the_tokens(self) -> None:
        model = llama()
        cache = new_cache(model)

        def stop(*_: object) -> None:
            raise KeyboardInterrupt

        with kvrecall.attach(model), torch.no_grad():
            hook = model.lm_head.register_forward_pre_hook(stop)
            with pytest.raises(KeyboardInterrupt):
                model(ids(), **cache_argument(cache))
            hook.remove()
            got = model.model(ids(3, 2), **cache_argument(cache)).last_hidden_state
        assert cache.get_seq_length() == 63
        want = model.model(torch.cat([ids(), ids(3, 2)], 1)).last_hidden_state[:, -3:]
        torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)

    def test_attn_implementation_chosen_inside_stays(self) -> None:
        model = llama()
        with kvrecall.attach(model):
            model.set_attn_implementation("eager")
            assert torch.equal(answer(model, ids(), new_cache(model)), answer(model, ids()))
        assert model.config._attn_implementation == "eager"


class TestThreads:
    def run(self, works: list[Callable[[], None]]) -> None:
        failed: list[BaseException] = []

        def guarded(work: Callable[[], None]) -> None:
            try:
                work()
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=guarded, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failed:
            raise failed[0]

    @pytest.mark.parametrize("shared", [True, False], ids=["one-model", "a-model-each"])
    def test_each_attaches(self, shared: bool) -> None:
        models = [llama()] * 3 if shared else [llama(i) for i in range(3)]
        prompts = [ids(30, i) for i in range(3)]
        want = [answer(model, prompt, new_tokens=3) for model, prompt in zip(models, prompts, strict=True)]

        def work(i: int) -> None:
            for _ in range(15):
                with kvrecall.attach(models[i]):
                    assert torch.equal(answer(models[i], prompts[i], new_cache(models[i]), new_tokens=3), want[i])

        self.run([lambda i=i: work(i) for i in range(3)])
        assert all(is_untouched(model) for model in models)

    def test_one_retrieves_while_another_does_not(self) -> None:
        model = llama()
        wants = [answer(model, ids(30, i), new_tokens=3) for i in range(2)]

        def work(i: int, cache: Callable[[], Any]) -> None:
            for _ in range(20):
                assert torch.equal(answer(model, ids(30, i), cache(), new_tokens=3), wants[i])

        with kvrecall.attach(model):
            self.run([lambda: work(0, lambda: new_cache(model)), lambda: work(1, lambda: DynamicCache(config=model.config))])
        assert is_untouched(model)

    def test_one_cache_in_two_passes_at_once(self) -> None:
        model = llama()
        cache, inside, go_on = new_cache(model), threading.Event(), threading.Event()

        def wait(layer: int, queries: torch.Tensor) -> None:
            inside.set()
            go_on.wait(10)

        def second() -> None:
            inside.wait(10)
            try:
                with pytest.raises(errors.ParameterError, match="one forward pass at a time"), torch.no_grad():
                    model(ids(), **cache_argument(cache))
            finally:
                go_on.set()

        cache.on_queries = wait
        with kvrecall.attach(model):
            self.run([lambda: model(ids(), **cache_argument(cache)), second])
        assert cache.get_seq_length() == 60

    def test_the_context_ends_while_another_thread_is_in_a_pass(self) -> None:
        model = llama()
        cache, inside, go_on = new_cache(model), threading.Event(), threading.Event()

        def wait(layer: int, queries: torch.Tensor) -> None:
            inside.set()
            go_on.wait(10)

        def attaching() -> None:
            with kvrecall.attach(model):
                inside.wait(10)
            go_on.set()

        def calling() -> None:
            while "_call_impl" not in vars(model):
                pass
            model(ids(), **cache_argument(cache))

        cache.on_queries = wait
        self.run([attaching, calling])
        assert cache.get_seq_length() == 60
        assert is_untouched(model)


class TestWhatDoesNotRetrieve:
    def test_static_caches(self) -> None:
        model = llama()
        want = answer(model, ids(30))
        with kvrecall.attach(model):
            static = StaticCache(config=model.config, max_cache_len=64)
            assert torch.equal(answer(model, ids(30), static), want)
            assert torch.equal(answer(model, ids(30), cache_implementation="static"), want)

    @pytest.mark.parametrize("implementation", ["eager", "sdpa"])
    @pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss"])
    def test_logits_are_the_same_bits(self, family: str, implementation: str) -> None:
        model = tiny(family)
        if family != "llama" and implementation == "sdpa":
            implementation = "eager"  # sdpa has no softcap and no sinks
        model.set_attn_implementation(implementation)
        mask = torch.ones(1, 60, dtype=torch.int64)
        mask[:, :7] = 0
        with torch.no_grad():
            want = model(ids(), attention_mask=mask).logits
            with kvrecall.attach(model):
                assert torch.equal(model(ids(), attention_mask=mask).logits, want)
        assert model.config._attn_implementation == implementation

    def test_towers_keep_their_own_implementations(self) -> None:
        from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

        vision = CLIPVisionConfig(
            hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=64, image_size=32, patch_size=8
        )
        text = LlamaConfig(**{**SMALL, "num_hidden_layers": 1})
        model: Any = LlavaForConditionalGeneration(LlavaConfig(vision_config=vision, text_config=text)).eval()
        model.set_attn_implementation({"vision_config": "eager", "text_config": "sdpa"})
        model.generation_config.eos_token_id = None

        def names() -> tuple[Any, ...]:
            return tuple(x._attn_implementation for x in (model.config, model.config.vision_config, model.config.text_config))

        before, seen = names(), []
        want = answer(model, ids())
        with kvrecall.attach(model):
            assert names() == before
            cache = new_cache(model)
            cache.on_queries = lambda *_: seen.append(names())
            assert torch.equal(answer(model, ids(), cache), want)
        assert names() == before
        assert {name[1] for name in seen} == {"eager"} and {name[2] for name in seen} == {"kvrecall"}


def test_a_model_is_attached_and_left_while_another_thread_looks_at_its_rotary_embedding() -> None:
    scaled = {"max_position_embeddings": 32, "rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}}

    def read(model: Any) -> torch.Tensor:
        cache = new_cache(model)
        with torch.no_grad(), cache.reading_prompt(100):
            model.model(ids(100)[:, :20], **cache_argument(cache), use_cache=True)
            return model.model(ids(100)[:, 20:], **cache_argument(cache), use_cache=True).last_hidden_state[:, -1]

    with kvrecall.attach(model := llama(**scaled)):
        expected = read(model)

    reached, goes_on = threading.Event(), threading.Event()

    def wait(*_: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            reached.set()
            goes_on.wait(20)

    def looked_at(model: Any) -> tuple[threading.Thread, Any]:
        reached.clear(), goes_on.clear()
        hook, thread = (
            model.model.layers[0].register_forward_pre_hook(wait),
            threading.Thread(target=rotaries_of, args=(model,)),
        )
        thread.start()
        assert reached.wait(20)
        return thread, hook

    model = llama(**scaled)
    looking, hook = looked_at(model)
    with kvrecall.attach(model):
        goes_on.set()
        looking.join()
        hook.remove()
        assert torch.equal(read(model), expected)
    assert is_untouched(model)

    model = llama(**scaled)
    with kvrecall.attach(model):
        looking, hook = looked_at(model)
    goes_on.set()
    looking.join()
    hook.remove()
    assert is_untouched(model)


def test_the_ids_that_a_hook_of_the_user_makes_are_known() -> None:
    model, cache = llama(), new_cache(llama())
    hook = model.register_forward_pre_hook(lambda _, args, kwargs: ((args[0] + 1,), kwargs), with_kwargs=True)
    with kvrecall.attach(model), torch.no_grad():
        model(ids().clamp_max(300), **cache_argument(cache), use_cache=True)
    assert torch.equal(cache.tokens.ids(), ids().clamp_max(300) + 1)
    hook.remove()
    assert is_untouched(model)


def test_a_model_is_restored_although_an_interrupted_pass_cannot_be_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, cache = llama(), new_cache(llama())

    def interrupt(*_: Any) -> None:
        raise KeyboardInterrupt

    def fail(*_: Any) -> None:
        raise errors.HostMemoryError(2, 1, 1)

    with pytest.raises(errors.HostMemoryError), kvrecall.attach(model):
        hook = model.model.layers[0].register_forward_pre_hook(interrupt)
        with pytest.raises(KeyboardInterrupt):
            model(ids(), **cache_argument(cache), use_cache=True)
        hook.remove()
        monkeypatch.setattr(cache, "align", fail)
    assert is_untouched(model)


def test_no_cache_is_kept_alive_by_the_model_or_by_a_refusal() -> None:
    model = llama()

    def skip(hidden_states: torch.Tensor, **_: Any) -> Any:
        return hidden_states, None

    def interrupt(**_: Any) -> None:
        raise KeyboardInterrupt

    def used(replaced: dict[str, Any]) -> weakref.ref[Any]:
        cache, attention = new_cache(model), model.model.layers[0].self_attn
        vars(attention).update(replaced)
        with pytest.raises((errors.UnsupportedModelError, KeyboardInterrupt)):
            model(ids(), **cache_argument(cache), use_cache=True)
        for name in replaced:
            delattr(attention, name)
        return weakref.ref(cache)

    gc.collect()
    gc.disable()
    try:
        with kvrecall.attach(model):
            assert used({"forward": skip})() is None
            interrupted = used({"forward": interrupt})
            answer(model, ids(), new_cache(model))
            gc.collect()
            assert interrupted() is None
    finally:
        gc.enable()
