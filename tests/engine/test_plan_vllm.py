"""What vLLM with our backend will need: the arithmetic of one published shape, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig

from kvrecall.core.errors import KVRecallError
from kvrecall.core.structs import AttentionParams
from kvrecall.engine.memory import plan_vllm
from kvrecall.index.base import LayerShape
from kvrecall.index.statistics import KeyStatistics, LayerStatistics, NoRotary
from kvrecall.step.capacity import held_bytes
from kvrecall.step.device import DeviceLayer
from kvrecall.step.places import Places
from kvrecall.step.plan import PassPlan
from kvrecall.step.settings import Settings
from tests.engine.test_plan import LLAMA_8B

GIVEN = {"method": "pariskv-balanced", "host_memory": "214GiB"}


def test_llama_8b_at_128k() -> None:
    """Rows of 128 KiB per token, pages of 81 + 8 bytes per token and KV head, a window of 1,024 tokens in blocks of 128. Rows
    fill host memory, and what is left on the device."""
    told = plan_vllm(LLAMA_8B, GIVEN, context_tokens=131072, batch=12, page_bytes=100 << 30)
    assert (told.host_bytes_per_token, told.summary_bytes_per_token) == (128 << 10, 89 * 8 * 32)
    assert told.block_host_bytes == 16 << 20 and told.window_pages == told.blocks_on_device // 8
    assert (told.host_blocks, told.admitted_tokens) == (13696, told.blocks * 128) and told.blocks_on_device % 16 == 0
    assert 0 <= 13696 + told.blocks_on_device - told.blocks < 16
    taken = (told.blocks_on_device + told.window_pages) * (16 << 20) + told.blocks * told.block_bytes
    assert 0 <= (100 << 30) - taken < 16 * (told.block_bytes + (18 << 20)), "blocks on the device come by sixteen"
    assert told.host_bytes == 12 * 1024 * (16 << 20) and 15 <= told.sequences <= (told.blocks - 1) // 1024
    assert told.device_bytes == 12 * (1024 * told.block_bytes + 9 * (16 << 20))
    assert told.needed_blocks == 1 + 1024 and told.fits
    assert told.weight_bytes == pytest.approx(11.87e9, rel=0.01)  # 5.93 billion numbers: the vocabulary is small
    assert not plan_vllm(LLAMA_8B, GIVEN, context_tokens=131072, batch=19, page_bytes=100 << 30).fits


def test_rows_in_eight_bits_take_half_of_host_memory_and_window() -> None:
    plain, eight = (
        plan_vllm(LLAMA_8B, GIVEN, context_tokens=131072, page_bytes=100 << 30, kv_cache_dtype=dtype)
        for dtype in ("auto", "fp8")
    )
    assert eight.host_bytes_per_token == plain.host_bytes_per_token // 2 and eight.host_blocks == 2 * plain.host_blocks
    assert eight.block_bytes == plain.block_bytes and eight.blocks_on_device < eight.blocks


def test_the_lesser_of_device_and_host_counts() -> None:
    device = plan_vllm(LLAMA_8B, GIVEN, context_tokens=65536, page_bytes=10 << 30)
    assert device.blocks < device.host_blocks and device.window_pages == 64 + 2 * 9, "a short sequence, two windows in flight"
    summaries = (device.blocks - device.blocks_on_device - device.needed_blocks) * device.block_bytes
    assert device.blocks_on_device * device.block_host_bytes == pytest.approx(summaries, rel=0.1), (
        "half for rows, half for summaries"
    )
    many = plan_vllm(LLAMA_8B, GIVEN, context_tokens=65536, page_bytes=30 << 30)
    assert device.blocks < many.blocks < many.host_blocks and many.blocks_on_device > 3 * device.blocks_on_device
    nothing = plan_vllm(LLAMA_8B, GIVEN, context_tokens=65536)
    if not torch.cuda.is_available():
        assert nothing.page_bytes is None and nothing.blocks == nothing.host_blocks
    for memory, pages, fits in (("1GiB", 10, True), ("1GiB", 8, False)):  # the rest of one sequence's rows lies on the device
        little = plan_vllm(LLAMA_8B, GIVEN | {"host_memory": memory}, context_tokens=65536, page_bytes=pages << 30)
        assert little.fits == fits and (little.blocks_on_device + little.host_blocks >= 513) == fits


def test_ranks_share_heads_and_host_memory() -> None:
    one, two = (plan_vllm(LLAMA_8B, GIVEN, context_tokens=65536, ranks=n, page_bytes=10 << 30) for n in (1, 2))
    assert (two.kv_heads, two.block_bytes, two.block_host_bytes) == (4, one.block_bytes // 2, one.block_host_bytes // 2)
    assert two.host_blocks == one.host_blocks and two.host_bytes == one.host_bytes
    assert two.blocks > one.blocks and two.scratch_bytes < one.scratch_bytes


def test_scratch_grows_with_rows_and_lengths() -> None:
    def scratch(batch: int, tokens: int) -> int:
        return plan_vllm(LLAMA_8B, GIVEN, context_tokens=tokens, batch=batch).scratch_bytes

    kept = 32 * 8 * (64 + 8 * 100) * (2 * 128 * 2 + 12)  # places in the row caches of all layers, for each row of a batch
    assert scratch(8, 65536) - scratch(7, 65536) >= kept
    assert scratch(8, 1 << 20) > scratch(8, 65536)


@pytest.mark.parametrize("drafts", [0, 3])
def test_scratch_is_what_layers_allocate(drafts: int) -> None:
    """Two layers of the same shape, with their plan of a pass."""
    given = {"method": "pariskv-balanced", "top_k": 24, "host_memory": "1GiB"}
    config = LlamaConfig(hidden_size=256, num_hidden_layers=2, num_attention_heads=8, num_key_value_heads=2, head_dim=32)
    told = plan_vllm(
        config, given, context_tokens=3000, batch=5, dtype=torch.float32, block_size=256, num_speculative_tokens=drafts
    )
    settings, params = Settings.of({"kvrecall": given}), AttentionParams(0.1)
    index = settings.index
    here, other = (
        LayerShape(1, 8, 2, 32, torch.float32, torch.device("cpu"), LayerStatistics(NoRotary(32), KeyStatistics.nothing(2, 32)))
        for _ in range(2)
    )
    places = Places(5, 8 * 24 + settings.method.sink_tokens, here.device)  # of a device with memory for them
    first = DeviceLayer(0, here, settings.method, index, params, 5, 3000, None, places, drafts)
    second = DeviceLayer(1, other, settings.method, index, params, 5, 3000, first.scratch, places, drafts)
    plan = PassPlan(5, 3000, settings.method, index, 256, here.device, drafts, places)
    shared = 4 * 32 * 32  # the rotation, counted for each layer because statistics of keys give each its own
    assert told.scratch_bytes == held_bytes([first, second], plan) + shared


def test_drafts_take_scratch_and_window() -> None:
    """The tokens of two drafts may be rejected; vLLM has one pass in flight, not two. All tokens of a sequence share its
    place in the row caches."""
    none, some = (
        plan_vllm(LLAMA_8B, GIVEN, context_tokens=131072, batch=32, page_bytes=100 << 30, num_speculative_tokens=n)
        for n in (0, 3)
    )
    assert some.scratch_bytes > none.scratch_bytes
    assert (some.blocks, some.host_bytes, some.num_speculative_tokens) == (none.blocks, none.host_bytes, 3)
    least = [
        plan_vllm(LLAMA_8B, GIVEN, context_tokens=131072, page_bytes=6 << 30, num_speculative_tokens=n).window_pages
        for n in (0, 3)
    ]
    assert least == [64 + 2 * 9, 65 + 10]


def test_memory_is_counted_once() -> None:
    one = torch.zeros(100, device="meta")
    assert held_bytes([one, one[:10], {"again": one}], torch.zeros(3, 5)) == 460


@pytest.mark.parametrize(
    ("given", "more", "said"),
    [
        ({"method": "prkv"}, {}, "Served are"),
        ({"host_memory": "much"}, {}, "host_memory"),
        ({}, {"block_size": 1000}, "block_size"),
        ({}, {"context_tokens": 0}, "context_tokens"),
        ({}, {"ranks": 5}, "ranks.*query heads"),
        ({}, {"num_speculative_tokens": -1}, "num_speculative_tokens"),
        ({}, {"kv_cache_dtype": "fp8_e5m2"}, "kv_cache_dtype: expected auto or fp8"),
        ({}, {"num_speculative_tokens": 1024}, "local_tokens: expected at least 1025, for a draft of 1024 tokens"),
    ],
)
def test_what_is_not_served_is_refused(given: dict[str, Any], more: dict[str, Any], said: str) -> None:
    with pytest.raises(KVRecallError, match=said):
        plan_vllm(LLAMA_8B, given, **{"context_tokens": 65536, **more})
