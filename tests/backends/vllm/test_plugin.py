"""What vLLM calls when it starts."""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec

import pytest

from kvrecall.backends.vllm import plugin

needs_vllm = pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm")


def test_a_vllm_without_the_classes_that_are_needed_goes_on_without_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "_registered", False)
    monkeypatch.setitem(sys.modules, "vllm.platforms", None)
    with pytest.warns(RuntimeWarning, match="kvrecall's attention backend does not work with this version"):
        plugin.register()
    assert not plugin._registered


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


def told(code: str) -> object:
    """What a process prints last, as JSON, after `START`."""
    run = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=240)
    assert run.returncode == 0, run.stderr[-3000:]
    return json.loads(run.stdout.splitlines()[-1])


@needs_vllm
def test_an_engine_without_kvrecall_loads_the_plugin_alone() -> None:
    code = """
plugin.register()
VllmConfig()
print(json.dumps(loaded()))
"""
    here = "kvrecall.backends.vllm"
    assert told(code) == ["kvrecall", "kvrecall.backends", here, f"{here}.plugin"]


@needs_vllm
def test_an_engine_that_asks_for_kvrecall_gets_its_worker_and_metrics_but_no_compiler() -> None:
    """vLLM's CPU workers look through all modules for kernels, and fail at what some compilers keep in theirs."""
    code = """
from prometheus_client import generate_latest
plugin.register()
asked = [dict(backend="CUSTOM"), dict(backend_per_kind={"full_attention": "CUSTOM"})]
workers = [made(**each).parallel_config.worker_cls for each in asked]
print(json.dumps([workers, b"kvrecall:searches" in generate_latest(), "numba" in sys.modules]))
"""
    assert told(code) == [[plugin.WORKER] * 2, True, False]


@needs_vllm
def test_layers_with_a_sliding_window_are_left_to_vllm_and_sinks_are_refused_by_the_layer() -> None:
    code = """
from types import SimpleNamespace
from vllm.platforms import current_platform
plugin.register()
shape = dict(use_mla=False, use_sparse=False, kv_cache_dtype="auto")
kinds = [(False, False), (True, False), (True, True), (False, True)]
layers = [SimpleNamespace(has_sliding_window=window, has_sink=sink, **shape) for window, sink in kinds]
print(json.dumps(["RetrievalBackend" in current_platform.get_attn_backend_cls(Names.CUSTOM, layer) for layer in layers]))
"""
    assert told(code) == [True, False, False, True]


@needs_vllm
def test_the_custom_backend_of_another_plugin_stays_its_own() -> None:
    """Where vLLM takes new names, kvrecall's has one, which also another process knows."""
    code = """
import pickle, subprocess
register_backend(Names.CUSTOM, "other.plugin.Backend")
plugin.register()
try:
    made(backend="CUSTOM")
except ValueError as error:
    said = str(error)
name = found = None
if hasattr(Names, "register"):
    config = made(backend=plugin.OTHER_NAME)
    name, packed = plugin.own_name(), pickle.dumps(config.attention_config)
    code = "import pickle, sys; print(pickle.load(sys.stdin.buffer).backend.get_path())"
    run = subprocess.run([sys.executable, "-c", code], input=packed, capture_output=True, check=True)
    found = run.stdout.decode().split()[-1]
print(json.dumps([Names.CUSTOM.get_path(), said, name, found]))
"""
    path, said, name, found = told(code)  # pyright: ignore[reportGeneralTypeIssues]
    assert path == "other.plugin.Backend"
    assert "attention backend CUSTOM: expected kvrecall's, got \"another plugin's (other.plugin.Backend)\"" in said
    assert "VLLM_PLUGINS=kvrecall" in said
    if name is not None:
        assert name == plugin.OTHER_NAME and f"--attention-backend {name}" in said
        assert found == "kvrecall.backends.vllm.backend.RetrievalBackend"


@needs_vllm
def test_a_refused_start_ends_with_the_reason() -> None:
    """Also if another process refuses, and vLLM's own error says less."""
    code = """
import subprocess
plugin.register()
made(backend="CUSTOM")
child = "from kvrecall.backends.vllm.refusals import kept\\nwith kept(): {}"
error = "from kvrecall.core.errors import ParameterError as E; raise E('x', 'a', 'b', 'Do c.')"
subprocess.run([sys.executable, "-c", child.format(error)], stderr=subprocess.DEVNULL)
from vllm.utils.import_utils import resolve_obj_by_qualname
resolve_obj_by_qualname("no.such")
"""
    run = subprocess.run([sys.executable, "-c", START + code], capture_output=True, text=True, timeout=240)
    assert run.returncode == 1 and run.stderr.splitlines()[-1] == "kvrecall: x: expected a, got 'b'. Do c."
    config = START + "plugin.register()\nmade({'method': 'prkv'}, backend='CUSTOM')"
    run = subprocess.run([sys.executable, "-c", config], capture_output=True, text=True, timeout=240)
    assert run.returncode == 1 and run.stderr.splitlines()[-1].startswith("kvrecall: vLLM with method=prkv: ")
