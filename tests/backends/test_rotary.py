"""The rotary embedding of a layer is the model's own: its real keys, far out, are what the answer says."""

from __future__ import annotations

import random
import threading
import warnings
from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.rotary import Rotaries, _Recorder, ask_model, rotaries_of, text_decoder
from kvrecall.backends.vllm.statistics import rotaries_of_config
from kvrecall.index.statistics import NoRotary, rotate, rotate_back
from tests.backends.models import SMALL, tiny
from tests.zoo.tiny import family, tiny_model

ROPE = {"rope_theta": 10000.0}
PARTIAL = ROPE | {"rope_type": "default", "partial_rotary_factor": 0.25}
FULL = ["full_attention"] * 3
SLIDING = {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention", "full_attention"]}
LONG = {"short_factor": [1.0 + 0.1 * i for i in range(32)], "long_factor": [2.0 + i for i in range(32)]}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
    "gemma2": ("Gemma2", SLIDING | {"query_pre_attn_scalar": 64}),
    "phi3": ("Phi3", {}),
    "phi3 longrope": (
        "Phi3",
        {
            "hidden_size": 256,
            "original_max_position_embeddings": 512,
            "rope_parameters": ROPE | {"rope_type": "longrope", **LONG},
        },
    ),
    "stablelm": ("StableLm", {"hidden_size": 256, "rope_parameters": PARTIAL}),
    "gpt-neox": ("GPTNeoX", {"rope_parameters": PARTIAL}),
    "phi": ("Phi", {"rope_parameters": PARTIAL | {"partial_rotary_factor": 0.5}}),
    "cohere": ("Cohere", {}),
    "glm": ("Glm", {"rope_parameters": PARTIAL | {"partial_rotary_factor": 0.5}}),
    "smollm3": ("SmolLM3", {"no_rope_layers": [1, 0, 1], "layer_types": FULL}),
    "gpt-oss": ("GptOss", SLIDING | {"num_local_experts": 2, "num_experts_per_tok": 1}),
    "yarn": (
        "Llama",
        {"rope_parameters": ROPE | {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}},
    ),
    "llama3": (
        "Llama",
        {
            "rope_parameters": ROPE
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 512}
        },
    ),
    "linear": ("Llama", {"rope_parameters": ROPE | {"rope_type": "linear", "factor": 4.0}}),
    "dynamic": (
        "Llama",
        {"max_position_embeddings": 512, "rope_parameters": ROPE | {"rope_type": "dynamic", "factor": 4.0}},
    ),
}


def made(family: str, **changes: Any) -> Any:
    name, own = MODELS[family]
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**{**SMALL, **own, **changes})
    model = getattr(transformers, f"{name}ForCausalLM")(config).eval()
    return biased(model)


def biased(model: Any) -> Any:
    """Biases and norms start as zeros and ones, which hide what they do."""
    draw = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw))
    return model


@torch.no_grad()
def real_keys(model: Any, ids: Tensor, first: int) -> dict[int, Tensor]:
    """Keys `[H_kv, n, D]` of each layer at positions from `first` on, with an attention that returns zeros."""
    cache = _Recorder(model.config)
    positions = torch.arange(first, first + ids.shape[1])[None]
    text_decoder(model)(input_ids=ids, position_ids=positions, **cache_argument(cache), use_cache=True)
    return {number: keys[0] for number, (keys, _) in cache.seen.items()}


def check(model: Any, found: Rotaries, eps: float = 1e-5) -> None:
    """Keys of the same tokens, far out, near, and before the embedding."""
    ids = torch.randint(20, 300, (1, 40), generator=torch.Generator().manual_seed(3))
    places = (0, 30, 700, 3000)
    keys = {first: real_keys(model, ids, first) for first in places}
    for number, layer in found.layers.items():
        plain = None
        for first in places:
            cos, sin = layer.rotary.cos_sin(first, 40)
            assert cos.dtype == sin.dtype == torch.float32 and cos.shape == (40, layer.dim)
            here = keys[first][number].float()
            assert here.shape[0] == layer.kv_heads
            before = rotate_back(here, cos, sin, layer.rotary.partner)
            plain = before if plain is None else plain
            assert (rotate(plain, cos, sin, layer.rotary.partner) - here).norm() <= eps * here.norm(), (number, first)


@pytest.mark.parametrize("family", MODELS)
def test_real_keys_are_what_the_answer_says(family: str) -> None:
    model = made(family)
    found = ask_model(model)
    assert not found.unknown
    plain = [n for n, layer in found.layers.items() if isinstance(layer.rotary, NoRotary)]
    assert plain == ([1] if family == "smollm3" else [])
    check(model, found, 2e-4 if "long" in family else 2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("family", ["llama", "qwen2", "glm", "yarn"])
def test_half_precision(family: str, dtype: torch.dtype) -> None:
    model = made(family).to(dtype)
    found = ask_model(model)
    assert not found.unknown
    check(model, found, 4 * torch.finfo(dtype).eps)
    cos, _ = found.layers[0].rotary.cos_sin(1, 1)
    assert (cos != cos.to(dtype).float()).any()  # it computes in fp32 whatever the model does


def test_two_embeddings() -> None:
    """Gemma 3 turns its sliding layers otherwise; only the others are ours."""
    model = biased(tiny("gemma3", num_hidden_layers=4))
    check(model, ask_model(model))
    cos, _ = ask_model(model).layers[1].rotary.cos_sin(1, 1)
    theta = model.config.rope_parameters["full_attention"]["rope_theta"]
    assert theta != model.config.rope_parameters["sliding_attention"]["rope_theta"]
    assert float(cos[0, 1]) == pytest.approx(torch.tensor(1.0 / theta ** (2 / 64)).cos().item(), rel=1e-6)


def test_three_positions_per_token() -> None:
    sections = {"rope_parameters": ROPE | {"rope_type": "default", "mrope_section": [8, 12, 12]}}
    text = SMALL | sections | {"hidden_size": 256}
    config = transformers.Qwen2VLConfig(text_config=text, image_token_id=310, video_token_id=311, vision_start_token_id=312)
    config.vision_config.depth, config.vision_config.embed_dim, config.vision_config.hidden_size = 1, 32, 256
    torch.manual_seed(0)
    model = biased(transformers.Qwen2VLForConditionalGeneration(config).eval())
    found = ask_model(model)
    assert not found.unknown and not any(isinstance(layer.rotary, NoRotary) for layer in found.layers.values())
    check(model, found)


def test_learned_positions_are_no_rotary_embedding() -> None:
    config = transformers.GPT2Config(n_embd=128, n_layer=2, n_head=2, vocab_size=320, n_positions=256)
    found = ask_model(transformers.GPT2LMHeadModel(config).eval())
    assert not found.unknown and all(isinstance(layer.rotary, NoRotary) for layer in found.layers.values())


class RotaryTable(torch.nn.Module):
    """Reads cos and sin of 256 positions from a table."""

    def __init__(self, own: torch.nn.Module) -> None:
        super().__init__()
        positions = torch.arange(256)[None]
        cos, sin = own(torch.zeros(1, 256, 64), positions)
        self.register_buffer("table", torch.cat([cos[0], sin[0]], -1), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, ...]:
        return self.table[position_ids].to(x.dtype).chunk(2, -1)


def test_a_table_ends() -> None:
    """Statistics and searches look ahead of the text; behind the end of the table they get its last row."""
    model = tiny("llama", max_position_embeddings=256)
    expected = ask_model(model).layers[0].rotary
    model.model.rotary_emb = RotaryTable(model.model.rotary_emb)
    found = ask_model(model)
    assert not found.unknown
    rotary = found.layers[0].rotary
    assert expected.positions is None and rotary.positions == 256
    for ours, theirs in zip(rotary.cos_sin(200, 9000), expected.cos_sin(200, 56), strict=True):
        assert torch.equal(ours[:56], theirs) and torch.equal(ours[56:], theirs[-1:].expand(8944, -1))
    cache = kvrecall.RetrievalCache(
        model.config, kvrecall.ParisKVBalanced(top_k=16, local_tokens=32, full_attention_threshold=0)
    )
    with kvrecall.attach(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its statistics come from the prompt
        for tokens in (200, 1, 1):
            assert model(torch.randint(20, 300, (1, tokens)), **cache_argument(cache)).logits.isfinite().all()
    assert cache.stats().total.counters.searches


@pytest.mark.parametrize("family", ["GPTJ", "CodeGen"])
def test_sin_before_cos_and_interleaved_pairs(family: str) -> None:
    config = getattr(transformers, f"{family}Config")(
        n_embd=256, n_layer=2, n_head=4, vocab_size=320, n_positions=4096, rotary_dim=32, bos_token_id=1, eos_token_id=2
    )
    model = biased(getattr(transformers, f"{family}ForCausalLM")(config).eval())
    found = ask_model(model)
    if Version(transformers.__version__) < Version("5.24.0.dev0"):
        assert found.unknown == (0, 1)  # the embedding is inside the attention
        return
    assert not found.unknown
    check(model, found)


def norm_behind_the_embedding() -> Any:
    return biased(transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**SMALL)).eval())


def test_what_cannot_be_asked_is_unknown_and_told_once() -> None:
    for model in (norm_behind_the_embedding(), norm_behind_the_embedding()):
        with pytest.warns(
            UserWarning, match="hunyuan_v1_dense: expected a rotary embedding .* layers 0, 1, 2. Retrieval works"
        ):
            found = rotaries_of(model)
        assert found.unknown == (0, 1, 2)
        assert all(isinstance(layer.rotary, NoRotary) for layer in found.layers.values())
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert rotaries_of(model) is found


def test_a_norm_behind_the_embedding_is_unknown() -> None:
    """Also with weights of ones, which a new model has and a trained one has not."""
    new = transformers.HunYuanDenseV1ForCausalLM(transformers.HunYuanDenseV1Config(**SMALL)).eval()
    for model in (new, norm_behind_the_embedding()):
        assert ask_model(model).unknown == (0, 1, 2)


def test_a_model_that_fails_is_unknown(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")

    def broken(*args: Any, **kwargs: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(model.model.layers[1], "forward", broken)
    found = ask_model(model)
    assert found.unknown == (0, 1, 2) and found.layers[0].kv_heads == 2
    assert not model.model.rotary_emb._forward_hooks


def test_lack_of_memory_is_raised(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny("llama")

    def full(*args: Any, **kwargs: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(model.model.layers[1], "forward", full)
    with pytest.raises(torch.OutOfMemoryError):
        rotaries_of(model)
    assert not model.model.rotary_emb._forward_hooks
    monkeypatch.undo()
    assert not rotaries_of(model).unknown


@pytest.mark.parametrize("family", ["llama", "dynamic", "phi3 longrope"])
def test_the_model_stays_as_it_was(family: str) -> None:
    model = made(family)
    model.train()
    model.model.layers[0].eval()
    modes = [module.training for module in model.modules()]
    rotary = model.model.rotary_emb
    held = {name: value.clone() if isinstance(value, Tensor) else value for name, value in vars(rotary).items()}
    buffers = {name: value.clone() for name, value in model.named_buffers()}
    implementation, state, numbers = model.config._attn_implementation, torch.get_rng_state(), random.getstate()
    found = ask_model(model)
    for layer in found.layers.values():
        layer.rotary.cos_sin(5000, 10)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, buffers[name]) for name, value in model.named_buffers())
    assert set(vars(rotary)) == set(held) and rotary.attention_scaling == held["attention_scaling"]
    assert rotary.max_seq_len_cached == held["max_seq_len_cached"]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model.config._attn_implementation == implementation
    assert torch.equal(torch.get_rng_state(), state) and random.getstate() == numbers
    assert all(parameter.grad is None for parameter in model.parameters())


def test_layers_with_one_embedding_share_it() -> None:
    layers = ask_model(tiny("llama")).layers
    assert len({id(layer.rotary) for layer in layers.values()}) == 1


@pytest.mark.parametrize(
    "name", ["llama", "olmoe", "gpt_neox", "falcon", "granitemoehybrid", "jamba", "cwm", "gemma3n_text", "stablelm"]
)
def test_a_small_model_with_the_same_config_has_the_same_embedding(name: str) -> None:
    """Whatever its heads' size follows from."""
    model = tiny_model(family(name))
    found, right = rotaries_of_config(model.config).layers, ask_model(model).layers
    assert found.keys() == right.keys()
    for number, layer in right.items():
        assert type(found[number].rotary) is type(layer.rotary)
        for one, other in zip(found[number].rotary.cos_sin(70, 9), layer.rotary.cos_sin(70, 9), strict=True):
            torch.testing.assert_close(one, other)


def test_in_inference_mode_attached_and_wrapped() -> None:
    from peft import LoraConfig, get_peft_model

    model = made("dynamic")
    wrapped = get_peft_model(model, LoraConfig(target_modules=["q_proj"]))
    with torch.inference_mode(), kvrecall.attach(wrapped):
        found = ask_model(model)
    assert not found.unknown
    check(model, found)


def test_with_the_hooks_of_accelerate() -> None:
    from accelerate import cpu_offload

    model = made("llama")
    expected = ask_model(model).layers[0].rotary.cos_sin(3, 5)
    cpu_offload(model, execution_device=torch.device("cpu"))
    found = ask_model(model)
    assert not found.unknown
    for one, other in zip(found.layers[0].rotary.cos_sin(3, 5), expected, strict=True):
        assert torch.equal(one, other)


def test_another_thread_keeps_its_turns() -> None:
    """While one thread asks, calls of another one are not answered with codes."""
    model = made("llama")
    ids = torch.randint(3, 300, (1, 20))
    with torch.no_grad():
        expected = model(ids).logits
    wrong: list[bool] = []
    ends = threading.Event()

    def call() -> None:
        while not ends.is_set():
            with torch.no_grad():
                wrong.append(not torch.equal(model(ids).logits, expected))

    thread = threading.Thread(target=call)
    thread.start()
    try:
        for _ in range(5):
            assert not ask_model(model).unknown
    finally:
        ends.set()
        thread.join()
    assert wrong and not any(wrong)
