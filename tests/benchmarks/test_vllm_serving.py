"""Kernels that Triton compiles while a prompt is read are counted, beside whoever else counts them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from benchmarks.vllm_serving import Compiled

triton: Any = pytest.importorskip("triton", reason="Triton is only there on Linux")


def test_compiled_kernels_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    runtime, others = triton.knobs.runtime, []
    monkeypatch.setattr(runtime, "jit_post_compile_hook", lambda **told: others.append(told["fn"].name))
    with Compiled() as made:
        for name in ("encode_kernel", "Some.store_kernel"):
            runtime.jit_post_compile_hook(fn=SimpleNamespace(name=name), is_manual_warmup=False)
    runtime.jit_post_compile_hook(fn=SimpleNamespace(name="later"))
    assert str(made) == "kernels compiled in the first prompt: 2 (encode_kernel, store_kernel);"
    assert others == ["encode_kernel", "Some.store_kernel", "later"]
    assert str(Compiled()) == "kernels compiled in the first prompt: 0;"
