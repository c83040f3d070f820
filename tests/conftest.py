"""Markers and the two real models that tests share. torch is imported late: pytest-xdist's own process has no need of it."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Generator, Iterator
from typing import Any

import pytest

NO_GPU = "needs a CUDA GPU; torch sees none"


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Modules and tests stay until the end, so the garbage collector never looks at them: that took a twentieth of the time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def pytest_unconfigure() -> None:
    """Python then takes everything apart at its end; Triton's bindings would tell of all that is left as leaks."""
    gc.unfreeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests marked `gpu` are skipped, with the reason, where there is none, and those marked `gpu2` where there are not two.

    Tests with real weights come first: they take longest, and one worker of several gets them all and loads the models. Those
    of the larger model follow those of the smaller one, which is fetched sooner.
    """
    import torch

    items.sort(key=_models_first)
    there = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for item in items:
        if item.get_closest_marker("gpu") and not there:
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        if item.get_closest_marker("gpu2") and there < 2:
            item.add_marker(pytest.mark.skip(reason=f"needs two CUDA GPUs; torch sees {there}"))


def _models_first(item: pytest.Item) -> int:
    model = item.get_closest_marker("model")
    return 2 if model is None else len(model.args)


@pytest.fixture(scope="session", autouse=True)
def statistics_folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Key statistics of tiny models stay out of the user's folder; all workers of a run share one."""
    from kvrecall.backends.transformers import statistics_file

    shared, own = tmp_path_factory.getbasetemp(), statistics_file.statistics_dir
    if "PYTEST_XDIST_WORKER" in os.environ:
        shared = shared.parent
    with pytest.MonkeyPatch.context() as patch:
        place = shared / "key-statistics"
        patch.setattr(statistics_file, "statistics_dir", lambda: own() if "KVRECALL_MODELS" in os.environ else place)
        yield


@pytest.fixture(scope="session", autouse=True)
def ctrl_c() -> Iterator[None]:
    """A shell starts background jobs with SIGINT ignored, and Python then leaves it so; tests that interrupt need it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.fixture(scope="session")
def smollm2_was_unpacked() -> bool:
    """Whether `smollm2` comes from the folder of dequantised weights of an earlier run, and not from the GGUF file."""
    import torch
    from scripts.offline_models import ensure

    from kvrecall.models import KNOWN
    from kvrecall.models.unpacked import folder_of, is_complete

    name = "smollm2-135m"
    return is_complete(folder_of(ensure(name), KNOWN[name].sha256, torch.float32))


@pytest.fixture(scope="session")
def smollm2(smollm2_was_unpacked: bool) -> tuple[Any, Any]:
    """(model, tokenizer): SmolLM2 135M in float32 on the CPU, where rounding decides no greedy token. Fetched on first use."""
    import torch

    from kvrecall import models

    return models.load("smollm2-135m", dtype=torch.float32, device="cpu")


@pytest.fixture(scope="session")
def qwen05b() -> tuple[Any, Any]:
    """(model, tokenizer): Qwen2.5-Coder 0.5B on the CPU, in the dtype that suits it: bfloat16 is slow where a CPU lacks it.
    Fetched on first use."""
    from scripts.offline_models import ensure

    from kvrecall import models

    ensure("qwen2.5-coder-0.5b")
    return models.load("qwen2.5-coder-0.5b", device="cpu")
