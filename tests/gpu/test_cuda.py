"""What only a CUDA GPU can show: pinned pools, and that the device path gives what the CPU path gives."""

from __future__ import annotations

import ctypes
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import kvrecall
from kvrecall.backends.transformers.cache_name import cache_argument
from kvrecall.backends.transformers.capture.runner import CapturedSteps
from kvrecall.cache.host_memory import Region
from kvrecall.core.cuda import HostCopy, to_device
from kvrecall.core.errors import NonFiniteError
from kvrecall.engine.prefill import prefill
from kvrecall.index.sphere import SphereIndex, reference
from kvrecall.index.sphere.codes import Codes, encode
from kvrecall.index.sphere.maps import rotation_matrix
from kvrecall.index.sphere.schedule import PAPER_SCHEDULE, stage_sizes
from tests.blocks import store

pytestmark = pytest.mark.gpu
ZONES: Any = {"sink_tokens": 4, "local_tokens": 16, "update_interval": 8}


def _tiny(dtype: torch.dtype) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=256, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2, head_dim=64, intermediate_size=256,
        vocab_size=512, max_position_embeddings=8192,
    )  # fmt: skip
    return LlamaForCausalLM(config).eval().to("cuda", dtype)


def pinned_region(tokens: int) -> Region:
    """All of it given: rows of 256 bytes, page-locked in three pieces."""
    region = Region((tokens, 2, 64), torch.bfloat16, torch.device("cuda"))
    for pieces in (tokens // 3, tokens // 2, tokens):
        region.commit(pieces)
    return region


def test_host_memory_is_pinned_and_exactly_sized() -> None:
    region = pinned_region(3000)
    tensor = region.tensor
    assert region.pinned and tensor.is_pinned() and tensor[-1].is_pinned()
    assert tensor.untyped_storage().nbytes() == 3000 * 256  # not rounded up to a power of two
    device = torch.empty_like(tensor, device="cuda")
    tensor.copy_(torch.arange(tensor.numel()).view(tensor.shape).to(torch.bfloat16))
    # No copy may cross the border of two parts that were page-locked one after the other; pieces never do.
    for near, own in zip(device.split(16), tensor.split(16), strict=True):
        near.copy_(own, non_blocking=True)
    torch.cuda.synchronize()
    assert torch.equal(device.cpu(), tensor)


def test_released_memory_can_be_registered_again() -> None:
    for _ in range(20):
        region = pinned_region(1 << 12)
        assert region.pinned and region.tensor.is_pinned()
        del region


def test_small_copies_arrive_together() -> None:
    """Several dtypes, an empty tensor and one that is not contiguous, there and back; the host's own are handed through."""
    mixed = [torch.arange(15, dtype=torch.int32).view(3, 5), torch.randn(7).bfloat16(), torch.empty(2, 0), torch.randn(4, 6).T]
    far = to_device(torch.device("cuda"), *mixed)
    assert all(there.is_cuda and torch.equal(there.cpu(), here) for there, here in zip(far, mixed, strict=True))
    near = HostCopy(*far, mixed[0]).wait()
    assert all(not back.is_cuda and torch.equal(back, here) for back, here in zip(near, [*mixed, mixed[0]], strict=True))
    assert near[0].is_pinned() and near[-1] is mixed[0]


def test_blocks_are_pinned() -> None:
    made = store(1, 2, 64, torch.bfloat16, "cuda", block_size=256)
    pool = made.host[0]
    rows = torch.randn(2, 700, 2, 64, device="cuda").bfloat16()
    for piece in rows.split(100, 1):
        pool.append(piece)
    assert made.memory.pinned and all(block.is_pinned() for block in pool.blocks())
    ids = torch.randint(0, 700, (2, 50))
    expected = torch.stack([rows[h, ids[h].cuda()] for h in range(2)]).cpu()
    assert torch.equal(pool.gather(ids), expected)


def test_refused_pinning_warns_and_falls_back(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def cudaHostRegister(*_: object) -> ctypes.c_int:
            return 2  # type: ignore[return-value]

    monkeypatch.setattr(torch.cuda, "cudart", lambda: Refusing)
    monkeypatch.setattr("kvrecall.core.cuda._warned", False)  # another test may have heard it
    with pytest.warns(RuntimeWarning, match="pageable"):
        region = pinned_region(1000)
    assert not region.pinned
    region.tensor.fill_(1.0)
    assert region.tensor.float().sum() == 1000 * 2 * 64


@pytest.mark.parametrize("mode", ["mean_q", "mean_softmax", "max", "per_head"])
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_search_on_the_gpu_finds_the_same_ids(mode: str, dim: int) -> None:
    generator = torch.Generator().manual_seed(dim)
    keys = torch.randn(2, 5000, dim, generator=generator)
    queries = torch.randn(2, 1 if mode == "mean_q" else 4, dim, generator=generator)
    codes = encode(keys, rotation_matrix(dim, 42))
    ids = codes.signs.long().transpose(1, 2)
    counts = torch.zeros(2, dim // 8, 256, dtype=torch.int32).scatter_add_(-1, ids, torch.ones_like(ids, dtype=torch.int32))
    sizes = stage_sizes(PAPER_SCHEDULE, 5000, 100, 4)
    cpu = reference.search_sequence(codes, counts, queries, sizes, 100, mode, dim**-0.5)
    moved = Codes(codes.signs.cuda(), codes.magnitudes.cuda(), codes.weights.cuda())
    gpu = reference.search_sequence(moved, counts.cuda(), queries.cuda(), sizes, 100, mode, dim**-0.5)
    assert torch.equal(gpu[0].cpu(), cpu[0]) and torch.equal(gpu[1].cpu(), cpu[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(
    "method",
    [kvrecall.ParisKV(top_k=10_000, **ZONES), kvrecall.Full(**ZONES)],
    ids=lambda m: m.name,
)  # fmt: skip
def test_covering_budget_gives_the_tokens_of_full_attention(method: kvrecall.Method, dtype: torch.dtype) -> None:
    model = _tiny(dtype)
    ids = torch.randint(0, 512, (2, 200), device="cuda")
    call = {"max_new_tokens": 48, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    expected = model.generate(ids, **call)
    cache = kvrecall.RetrievalCache(model.config, method)
    with kvrecall.attach(model):
        out = model.generate(ids, **cache_argument(cache), **call)
    agree = (out == expected).float().mean().item()
    assert agree == 1.0 if dtype == torch.float32 else agree > 0.9  # bf16: another kernel may round a near-tie the other way
    total = cache.stats().to_dict()["total"]
    # Rows of a layer that searches nothing stay on the GPU.
    assert (total["bytes_to_device"] > 0) == (total["bytes_to_host"] > 0) == (method.top_k is not None)


@pytest.mark.parametrize("gqa", ["mean_q", "per_head"])
def test_small_budget_runs_and_counts_its_bytes(gqa: str) -> None:
    model = _tiny(torch.bfloat16)
    method = kvrecall.ParisKV(top_k=16, gqa=gqa, sink_tokens=4, local_tokens=16, update_interval=8, full_attention_threshold=0)
    cache = kvrecall.RetrievalCache(model.config, method)
    ids = torch.randint(0, 512, (1, 300), device="cuda")
    with kvrecall.attach(model):
        model.generate(ids, **cache_argument(cache), max_new_tokens=20, do_sample=False, eos_token_id=None, pad_token_id=0)
    counters = cache.stats().total.counters
    row = 2 * 64 * 2
    assert counters.bytes_to_device == (counters.retrieved_tokens - counters.reused_rows) * row
    assert counters.bytes_saved == counters.reused_rows * row
    assert counters.searches == 19 * 3


def test_non_finite_keys_are_reported_at_the_next_host_check() -> None:
    model = _tiny(torch.float32)
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV())
    ids = torch.randint(0, 512, (1, 40), device="cuda")
    with kvrecall.attach(model), torch.inference_mode():
        model(ids, **cache_argument(cache))
        keys = model.model.layers[1].self_attn.k_proj
        keys.register_forward_hook(lambda module, args, output: output * float("nan"))
        model(ids[:, :1], **cache_argument(cache))
    with pytest.raises(NonFiniteError, match="layer 1"):
        cache.stats()


def test_a_captured_decode_finds_announced_memory_large_enough() -> None:
    model = _tiny(torch.bfloat16)
    cache = kvrecall.RetrievalCache(model.config, kvrecall.ParisKV(top_k=16, full_attention_threshold=0, **ZONES))
    prefill(model, torch.randint(0, 512, (2, 700), device="cuda"), cache, chunk_tokens=256, expect_tokens=740)

    def places() -> list[int]:
        found = []
        for state in (layer.state for layer in cache.retrieval_layers):
            assert state is not None and isinstance(state.index, SphereIndex)
            table = state.store.ensure_blocks(1)
            found += [state.index.pages.tensor.data_ptr(), table.rows.data_ptr(), *table.blocks.flatten().tolist()]
        return found

    before = places()
    captured, tokens = CapturedSteps(model, cache, required=True), torch.zeros(2, 1, dtype=torch.int64, device="cuda")
    for _ in range(40):
        captured.step(tokens, 40)
    captured.close()
    assert places() == before
