"""What vLLM calls when it starts."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest

from kvrecall.backends.vllm import plugin
from kvrecall.backends.vllm.checks import WORKER

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm")


def test_a_vllm_without_the_classes_that_are_needed_goes_on_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.warns(RuntimeWarning, match=r"not registered: this vLLM lacks .* Tested are 0.26, "):
        plugin.register()
    assert not plugin._registered


@pytest.mark.parametrize(("version", "told"), [("0.32.0", False), ("0.33.1", False), ("0.34.0", True), ("0.28.0", True)])
def test_a_vllm_that_is_not_tested_is_told_of(version: str, told: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm", SimpleNamespace(__version__=version))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        plugin._tell_version()
    assert [version in str(each.message) and "0.26, 0.32, 0.33" in str(each.message) for each in seen] == [True] * told


START = """
import json, sys
from vllm.v1.attention.backends.registry import AttentionBackendEnum as Names, register_backend
from vllm.config import AttentionConfig, ParallelConfig, VllmConfig
from kvrecall.backends.vllm import plugin

def loaded():
    return sorted(name for name in sys.modules if name.split(".")[0] == "kvrecall")

def made(settings=None, **asked):
    return VllmConfig(attention_config=AttentionConfig(**asked), additional_config={"kvrecall": settings or {}})
"""


def told(code: str, ends: int = 0) -> tuple[Any, str]:
    """What a process prints last, as JSON, and the last line of its log. code: behind `START`. ends: its exit code."""
    run = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=240)
    assert run.returncode == ends, run.stderr[-3000:]
    printed = [line for line in run.stdout.splitlines() if line.startswith(("[", "{"))]  # vLLM logs there, too
    return json.loads(printed[-1]), ["", *run.stderr.splitlines()][-1]


@needs_vllm
def test_an_engine_without_kvrecall_loads_the_plugin_alone() -> None:
    code = """
plugin.register()
VllmConfig()
print(json.dumps(loaded()))
"""
    here = "kvrecall.backends.vllm"
    assert told(code)[0] == ["kvrecall", "kvrecall.backends", here, f"{here}.plugin"]


@needs_vllm
def test_an_engine_that_asks_for_kvrecall() -> None:
    """It gets kvrecall's worker and metrics, and no compiler: vLLM's CPU workers look through all modules for kernels, and fail
    at what some compilers keep in theirs. Layers with a sliding window are vLLM's; a layer with sinks refuses them itself. If
    another process refuses and vLLM's own error says less, the log ends with the reason."""
    code = """
import subprocess
from types import SimpleNamespace
from prometheus_client import generate_latest
from vllm.platforms import current_platform
plugin.register()
asked = [dict(backend="CUSTOM"), dict(backend_per_kind={"full_attention": "CUSTOM"})]
workers = [made(**each).parallel_config.worker_cls for each in asked]
shape = dict(use_mla=False, use_sparse=False, kv_cache_dtype="auto")
kinds = [(False, False), (True, False), (True, True), (False, True)]
layers = [SimpleNamespace(has_sliding_window=window, has_sink=sink, **shape) for window, sink in kinds]
ours = ["RetrievalBackend" in current_platform.get_attn_backend_cls(Names.CUSTOM, layer) for layer in layers]
print(json.dumps([workers, b"kvrecall:searches" in generate_latest(), "numba" in sys.modules, ours]), flush=True)

child = "from kvrecall.backends.vllm.last_line import kept\\nwith kept(): {}"
error = "from kvrecall.core.errors import ParameterError as E; raise E('x', 'a', 'b', 'Do c.')"
subprocess.run([sys.executable, "-c", child.format(error)], stderr=subprocess.DEVNULL)
Names["no such backend"]  # an error of vLLM's
"""
    found, last = told(code, ends=1)
    assert found == [[WORKER] * 2, True, False, [True, False, False, True]]
    assert last == "kvrecall: x: expected a, got 'b'. Do c."


@needs_vllm
def test_the_custom_backend_of_another_plugin_stays_its_own() -> None:
    """Where vLLM takes new names, kvrecall's has one, which also another process knows. Who has kvrecall's settings and the
    other's name is told, in the log's last line."""
    code = """
import pickle, subprocess
register_backend(Names.CUSTOM, "other.plugin.Backend")
plugin.register()
name = found = None
if hasattr(Names, "register"):
    config = made(backend=plugin.OTHER_NAME)
    name, packed = plugin.own_name(), pickle.dumps(config.attention_config)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).backend.get_path())"
    run = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=True)
    found = run.stdout.decode().split()[-1]
print(json.dumps([Names.CUSTOM.get_path(), name, found]), flush=True)
made(backend="CUSTOM")
"""
    (path, name, found), last = told(code, ends=1)
    assert path == "other.plugin.Backend"
    assert last.startswith(
        "kvrecall: attention backend CUSTOM: expected kvrecall's, got \"another plugin's (other.plugin.Backend)\""
    )
    assert "VLLM_PLUGINS=kvrecall" in last
    if name is not None:
        assert name == plugin.OTHER_NAME and f"--attention-backend {name}" in last
        assert found == "kvrecall.backends.vllm.backend.RetrievalBackend"
