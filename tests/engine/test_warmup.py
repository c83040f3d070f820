"""After an engine of vLLM has warmed up, no pass of a prompt or a step compiles a kernel. No GPU is needed: a launch is known
by what Triton specialises it on."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import accumulate
from typing import Any

import pytest
import torch

import kvrecall
from kvrecall.attend import cudnn
from kvrecall.core.structs import AttentionParams
from kvrecall.methods.base import Method
from kvrecall.step.device import DeviceLayer, searched_together
from kvrecall.step.forward_pass import Pass, Window
from kvrecall.step.places import Places
from kvrecall.step.plan import PassPlan
from kvrecall.step.stream import PLACES, STREAMED_TOKENS, RowBlocks
from kvrecall.step.summaries import width_of
from kvrecall.step.warmup import FakeMetadata, Layout, Limits, Trial, trials
from tests.index.sphere.with_statistics import Model

pytest.importorskip("triton", reason="Triton is only there on Linux")
pytestmark = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="the interpreter compiles nothing")

HEADS, GROUP, DIM, BLOCK, LONGEST, MOST, CHUNK = 2, 4, 64, 128, 1900, 40, 600
METHOD = kvrecall.methods.get(
    "pariskv-balanced", top_k=20, sink_tokens=16, local_tokens=64, estimate="page-means:page_tokens=32"
)
PAGES = kvrecall.methods.get("arkvale", top_k=70, sink_tokens=16, local_tokens=64, page_tokens=32)


class Passes:
    """A layer, whose launches are recorded and do nothing."""

    def __init__(self, method: Method, drafts: int, keeps: bool) -> None:
        self.drafts, here, index = drafts, torch.device("cpu"), method.index_config()
        assert index is not None
        shape = replace(Model(1, HEADS, GROUP, DIM).layer(HEADS, tokens=20), sequences=1, dtype=torch.bfloat16)
        places = Places(2, 90, here) if keeps else Places(0, 0, here)
        self.layer = DeviceLayer(0, shape, method, index, AttentionParams(0.1), MOST, LONGEST, None, places, drafts)
        self.plan = PassPlan(MOST, LONGEST, method, index, BLOCK, here, drafts, places)
        self.layer.bind(
            torch.zeros(3, width_of(index, method.estimate_config(), shape) * BLOCK * HEADS, dtype=torch.uint8),
            RowBlocks(3, shape, BLOCK, pages=3),
        )
        whole = torch.empty(2, (GROUP + 2) * HEADS, DIM, dtype=torch.bfloat16)  # one product gives all three
        self.layout = Layout.of(whole.split([GROUP * HEADS, HEADS, HEADS], 1))

    def run(self, trial: Trial) -> None:
        here = torch.device("cpu")
        q, k, v = self.layout.random(sum(trial.counts), here)
        told = FakeMetadata.of(trial, BLOCK, LONGEST, here)
        window = Window(told.block_table_tensor, told.slot_mapping)
        self.layer.forward(q, k, v, Pass.of(told, self.plan, BLOCK, self.drafts), window, torch.zeros(q.shape, dtype=q.dtype))


@pytest.mark.parametrize(
    ("method", "drafts", "keeps"),
    [(METHOD, 0, True), (METHOD, 0, False), (METHOD, 3, True), (PAGES, 0, True), (PAGES, 3, True)],
)
def test_nothing_is_compiled_later(
    method: Method, drafts: int, keeps: bool, launches: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever a prompt's length, its row of the batch, and the number of sequences that decode beside it."""
    monkeypatch.setattr("kvrecall.index.sphere.kernels.search.capability", lambda _: (9, 0))
    monkeypatch.setattr("kvrecall.merge.kernels_available", lambda _: True)
    passes, dense, each = Passes(method, drafts, keeps), method.sink_tokens + method.local_tokens, 1 + drafts
    limits = Limits(CHUNK, LONGEST, dense, 32, drafts, MOST * each, searched_together(MOST * each, LONGEST))
    for trial in trials(limits, gpu=True):
        passes.run(trial)
    known = set(launches)
    names = {kernel.__name__ for kernel, *_ in launches.values()}
    assert {"store_kernel", "run_kernel", "take_in_kernel"} <= names
    assert ({"encode_placed_kernel", "mean_kernel"} if method is METHOD else {"pages_kernel", "expand_kernel"}) <= names
    assert {"plan_kernel", "window_kernel", "paged_step_kernel"} <= names
    for count, past in ((1 + each, 0), (33, 0), (128, 0), (599, 0), (600, 600), (599, 1301), (8, 1), (100, 1024)):
        for steps in (0, 1, 3, 16):
            counts = [each] * steps + [count, 1 + each]
            passes.run(Trial(counts, [300] * steps + [past + count, 700]))
    for rows in range(1, MOST + 1):
        passes.run(Trial([each] * rows, [*accumulate([40] * rows)]))
    new = [launches[key][0].__name__ for key in launches if key not in known]
    assert not new


def test_trials_reach_cudnn_and_use_every_buffer_twice() -> None:
    limits = Limits(8192, 131072, 1056, 64, 0, 32, 32)
    first, later, last, *steps = trials(limits, gpu=True)
    assert (first.counts, first.lengths) == ([8192], [8192])
    past = later.lengths[0] - later.counts[0]
    assert later.counts == [8192] and past > PLACES * STREAMED_TOKENS
    assert later.lengths[0] >= cudnn.least_among(8192) > first.lengths[0]
    begins, count = last.lengths[0] - last.counts[0], last.counts[0]
    assert begins % 2 == count % 2 == 1 and count < cudnn.least_among(begins)
    assert begins // 64 < last.lengths[0] // 64, "a page is complete"
    assert [sum(step.counts) for step in steps] == [*range(1, 33), 32]
    assert all(length > limits.dense for step in steps for length in step.lengths)


@pytest.mark.parametrize(
    "limits", [Limits(512, 64, 96, 64, 0, 4, 4), Limits(8, 8, 1, 1, 3, 8, 8), Limits(256, 300, 80, 64, 0, 1, 1)]
)
@pytest.mark.parametrize("gpu", [False, True])
def test_trials_fit_into_short_sequences(limits: Limits, gpu: bool) -> None:
    for trial in trials(limits, gpu):
        assert sum(trial.counts) <= max(limits.chunk, limits.decodes, limits.drafts + 33)
        for count, length in zip(trial.counts, trial.lengths, strict=True):
            assert 0 < count <= length <= max(limits.longest, count)


@pytest.mark.parametrize("tokens", [1, 7])
def test_random_numbers_lie_as_the_model_s_do(tokens: int) -> None:
    """Queries and keys are views of one tensor, values are not."""
    whole, alone = torch.empty(5, 10, 8), torch.empty(5, 2, 8)
    given = [whole[:, 1:7], whole[:, 7:9], alone]
    q, k, v = Layout.of(given).random(tokens, torch.device("cpu"))
    for made, like in zip((q, k, v), given, strict=True):
        assert made.shape == (tokens, *like.shape[1:]) and made.stride() == like.stride() and made.ne(0).all()
    assert k.untyped_storage().data_ptr() == q.untyped_storage().data_ptr() != v.untyped_storage().data_ptr()
    assert k.storage_offset() - q.storage_offset() == given[1].storage_offset() - given[0].storage_offset()
