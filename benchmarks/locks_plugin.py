"""The plugin locks-kv: its CUDA extensions, compiled here or elsewhere, and the signs by which it is at work."""

# vLLM and locks-kv are installed where this is imported.
# pyright: reportMissingImports=false

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

PAGE = 16
"""Tokens of a page."""
_BUILDS = {
    "score": "from locks.selection import rki4_score_cuda as m; m._get()",
    "select": "from locks.selection import select_cuda as m; m._get()",
    "gemv": "from locks.backend import gemv_cuda as m; assert m.get_mod() is not None",
    "k5": "from locks.tier import k5_cuda as m; assert m.get_mod() is not None",
}


class PluginOff(RuntimeError):
    """The plugin does not do the work that is measured."""


def builds(own: dict[str, str]) -> list[str]:
    """Extensions that a run needs."""
    return ["score", "select", *(("gemv", "k5") if own.get("LOCKS_QFIRST_CO") == "1" else ())]


def header_folders() -> str:
    """Folders of CUDA's headers (cuSPARSE, cuBLAS, cuSOLVER) of pip packages, behind those that are searched anyway."""
    found = [str(each) for folder in sys.path for each in Path(folder or ".").glob("nvidia/cu*/include")]
    found += [str(each) for folder in sys.path for each in Path(folder or ".").glob("nvidia/cu[a-z]*/include")]
    return os.pathsep.join(filter(None, [os.environ.get("CPLUS_INCLUDE_PATH"), *dict.fromkeys(found)]))


def compile_plugin(own: dict[str, str]) -> float:
    """Compiles the plugin's CUDA with nvcc, one process each at once, into torch's cache of extensions. Seconds."""
    begun = time.perf_counter()
    os.environ["CPLUS_INCLUDE_PATH"] = header_folders()
    if Path("/usr/local/cuda/bin").is_dir():  # torch would take the folder of the nvcc that it finds first
        os.environ.setdefault("CUDA_HOME", "/usr/local/cuda")
    rope = "from locks.backend import _runtime as r; r._NOROPE_ROT, r._NOROPE_NEOX = 128, True; "
    head = rope if own.get("LOCKS_QFIRST_CO") == "1" else ""
    running = {
        name: subprocess.Popen(
            [sys.executable, "-c", head + _BUILDS[name]], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        for name in builds(own)
    }
    for name, process in running.items():
        told, _ = process.communicate()
        print(f"compiled {name} of locks-kv: exit {process.returncode}, {time.perf_counter() - begun:.0f} s", flush=True)
        if process.returncode:
            raise PluginOff(f"locks-kv's extension {name!r} does not compile:\n{told[-6000:]}")
    return time.perf_counter() - begun


def load_prebuilt(folder: Path, own: dict[str, str]) -> None:
    """Gives the plugin extensions that were compiled elsewhere for this torch and Python, with the same variables."""
    from importlib.machinery import ExtensionFileLoader
    from importlib.util import module_from_spec, spec_from_file_location

    import torch  # noqa: F401  the extensions need its libraries
    from locks.backend import gemv_cuda
    from locks.selection import rki4_score_cuda, select_cuda
    from locks.tier import k5_cuda

    fused = own.get("LOCKS_QFIRST_CO") == "1"
    folder = folder / ("short" if fused else "plain")

    def load(start: str) -> Any:
        (path,) = folder.glob(f"{start}*.so")
        spec = spec_from_file_location(path.stem, path, loader=ExtensionFileLoader(path.stem, str(path)))
        assert spec is not None and spec.loader is not None
        made = module_from_spec(spec)
        spec.loader.exec_module(made)
        return made

    rki4_score_cuda._MOD = load("locks_rki4_score")
    select_cuda._MOD, select_cuda._TRIED = load("locks_topb_select_cuda"), True
    if fused:
        gemv_cuda._MOD, gemv_cuda._TRIED = load("locks_gemv"), True
        k5_cuda._MOD, k5_cuda._TRIED = load("locks_k5_headv"), True
    print(f"locks-kv's extensions were loaded from {folder}", flush=True)


def page_state(blocks: int) -> Any:
    """The plugin's state of selected pages, that of the real cache."""
    from locks.selection.rki4_state import Rki4State

    gc.unfreeze()  # vLLM freezes all objects after its warm-up; frozen ones are not listed
    found = [each for each in gc.get_objects() if type(each) is Rki4State]
    fitting = [each for each in found if blocks == each.NB]
    if len(fitting) != 1:
        raise PluginOff(f"expected one page state of {blocks} blocks, got states of {[each.NB for each in found]} blocks")
    return fitting[0]


def check_plugin(llm: Any) -> Any:
    """Says by what signs the plugin is active, after a first request. Returns its page state."""
    from locks.backend import _runtime, attn
    from locks.backend.attn import LocksAttentionImpl

    register = sys.modules["locks.backend.register"]  # the package's attribute of this name is a function
    config = llm.llm_engine.vllm_config
    layers = config.compilation_config.static_forward_context
    impls = [type(layer.impl).__name__ for layer in layers.values() if hasattr(layer, "impl")]
    own = [layer for layer in layers.values() if isinstance(getattr(layer, "impl", None), LocksAttentionImpl)]
    signs = {
        "registered": register._APPLIED, "backend chosen": register._ANNOUNCED,
        "decode path": _runtime.get_tier() is not None if _runtime.get_config().is_mem else attn._ANNOUNCED,
        "selection kernels": _runtime._PPSEL_ANNOUNCED, "every layer": len(own) == len(impls) > 0,
        "no step without state": not attn._DELEG_SAID,
    }  # fmt: skip
    print(f"locks-kv: {signs}; layers: {sorted(set(impls))}; counters: {attn.get_activation()}; "
          f"kernels: {_runtime._DEC_RESOLVED}; graphs: {config.compilation_config.cudagraph_mode}", flush=True)  # fmt: skip
    missing = [name for name, there in signs.items() if not there]
    if missing:
        raise PluginOff(f"locks-kv is not active: {missing}")
    state = page_state(config.cache_config.num_gpu_blocks)
    state.fast = not _runtime.get_config().is_mem
    return state


def dense_rows() -> int:
    """Decode rows that the plugin handed to dense attention, those of the start included."""
    from locks.backend.attn import get_activation

    return (get_activation() or {"dense": 0})["dense"]


def check_step(state: Any, context: int, produced: int, budget: int, dense_before: int) -> tuple[int, int]:
    """Pages that the last step attended to, and all pages. They were zero before, so only a step can have written them."""
    import torch
    from locks.backend.attn import get_activation

    torch.cuda.synchronize()
    kept, pages = state.page_cnt[0].tolist(), int(state.n_pages[0])
    least, most = (context + produced - 2) // PAGE, -(-(context + produced + 1) // PAGE)
    wanted = min(budget // PAGE, pages)
    if not least <= pages <= most:
        raise PluginOff(f"context {context}: expected {least} to {most} pages in the plugin's last step, got {pages}")
    if set(kept) != {wanted}:
        raise PluginOff(f"context {context}: expected {wanted} pages per head in the last step, got {kept}")
    last_chosen = state.page_table[0, :, wanted - 2]  # the page before the last one's window: ascending pages
    if pages > 4 * wanted and int(last_chosen.max()) < wanted:
        raise PluginOff(f"context {context}: every head attended to the first pages only: the scores all tie")
    told = get_activation()
    if dense_rows() > dense_before or (told is None and state.fast):
        raise PluginOff(f"context {context}: decode rows were served by dense attention: {told}")
    summaries = int((~state.pp_tag[-1, :, 0, 0].isnan()).sum())
    print(
        f"locks-kv at {context}: {wanted} of {pages} pages per head in the last step, {summaries} summaries; {told}", flush=True
    )
    if summaries < pages - 2:
        raise PluginOff(f"context {context}: expected summaries of {pages - 2} pages or more, got {summaries}")
    return wanted, pages
