"""`kvrecall info [SESSION]`"""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from kvrecall.cli.models import known_models
from kvrecall.cli.process import waiting
from kvrecall.cli.screen import method_text, plain_table, results, size
from kvrecall.cli.session_store import disk_bytes
from kvrecall.cli.verb import Result, verb

if TYPE_CHECKING:
    import torch

PACKAGES = ("torch", "transformers", "numba", "triton", "numpy", "gguf", "accelerate")


@verb
def info(session: Annotated[Path | None, typer.Argument(help="Folder of a saved session.")] = None) -> Result:
    """Show versions, devices, methods and models; or what a saved session holds."""
    if session is not None:
        return _about_session(session)

    from kvrecall import methods

    result: Result = {
        "versions": _versions(),
        "devices": _devices(),
        "methods": [methods.describe(name) for name in methods.names()],
        "models": known_models(),
    }
    _show(result)
    return result


def _about_session(folder: Path) -> Result:
    from kvrecall.backends.transformers.session import read_info

    info = read_info(folder)
    whole = info.about.get("tokens", info.tokens)
    result: Result = {
        "folder": str(folder),
        "model": info.about.get("model"),
        "model_type": info.model,
        "dtype": info.dtype,
        "method": info.method,
        "settings": info.settings,
        "tokens": info.tokens,
        "document_tokens": whole,
        "whole": info.tokens >= whole,
        "sequences": info.sequences,
        "rows": info.rows,
        "bytes": info.nbytes,
        "disk_bytes": disk_bytes(folder),
        "files": info.about.get("files", []),
        "first_words": info.about.get("first_words"),
    }
    table = plain_table()
    table.add_row("session", result["folder"])
    read = "" if result["whole"] else f" of {whole:,}: go on with `kvrecall read` and the same files"
    several = f", {info.sequences} sequences" if info.sequences > 1 else ""
    table.add_row("tokens", f"{info.tokens:,}{read}{several}")
    form = "as they are" if info.rows == "plain" else f"in {info.rows}"
    table.add_row("on disk", f"{size(result['disk_bytes'])}, rows {form}")
    table.add_row("model", f"{result['model'] or 'a model'} ({info.model}, {info.dtype})")
    table.add_row("method", method_text(info.method, info.settings))
    if result["files"]:
        table.add_row("read from", ", ".join(result["files"]))
    if result["first_words"]:
        table.add_row("first words", result["first_words"])
    results().print(table)
    return result


def _versions() -> dict[str, str | None]:
    import kvrecall

    versions: dict[str, str | None] = {"kvrecall": kvrecall.__version__, "python": platform.python_version()}
    for package in PACKAGES:
        versions[package] = None
        with suppress(metadata.PackageNotFoundError):
            versions[package] = metadata.version(package)
    return versions


def _devices() -> list[dict[str, Any]]:
    import torch

    from kvrecall.cache.host_memory import available_host_bytes

    cpu_name = torch.cpu.get_capabilities().get("cpu_name") if hasattr(torch.cpu, "get_capabilities") else None
    devices: list[dict[str, Any]] = [{
        "device": "cpu", "name": cpu_name or platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "threads": torch.get_num_threads(), "waiting": waiting(), "available_bytes": available_host_bytes(),
        "numba": _numba_loops(),
    }]  # fmt: skip
    for number in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        free, total = torch.cuda.mem_get_info(number)
        devices.append({
            "device": f"cuda:{number}", "name": torch.cuda.get_device_name(number), "available_bytes": free,
            "total_bytes": total, "kernels": _kernels(torch.device("cuda", number)),
        })  # fmt: skip
    return devices


def _numba_loops() -> str | None:
    """How numba runs parallel loops; None without numba."""
    if find_spec("numba") is None:
        return None
    from numba import get_num_threads
    from numba.np.ufunc import threading_layer

    from kvrecall.core.numba import several_threads_may_loop

    several = "loops of several requests side by side" if several_threads_may_loop() else "loops of one request at a time"
    return f"{get_num_threads()} threads by {threading_layer()}, {several}"


def _kernels(device: torch.device) -> str:
    """What searches by one-bit products run on there, for head sizes and groups that kernels are for."""
    from kvrecall.core.launch import kernels_available

    if not kernels_available(device):
        return "none: torch does the work"
    from kvrecall.index.sphere.kernels.search import binary_products

    return "Triton, binary tensor cores" if binary_products(device) else "Triton, integer tensor cores"


def _show(result: Result) -> None:
    console = results()
    versions = plain_table("versions")
    for name, version in result["versions"].items():
        versions.add_row(name, version or "not installed")
    devices = plain_table("devices", "device", "name", "memory free", "kernels")
    for device in result["devices"]:
        devices.add_row(device["device"], device["name"], size(device["available_bytes"]), device.get("kernels", "–"))
    cpu = result["devices"][0]
    threads = plain_table("threads")
    threads.add_row("torch", f"{cpu['threads']} threads on {cpu['cores']} cores")
    threads.add_row("numba", cpu["numba"] or "not installed")
    threads.add_row("they wait", cpu["waiting"])
    methods = plain_table("methods", "name", "what it does", prose=True)
    for method in result["methods"]:
        methods.add_row(method["name"], method["summary"])
    models = plain_table("models", "name", "state", "size")
    for model in result["models"]:
        models.add_row(model["name"], model["state"], size(model["bytes"]))
    for table in (versions, devices, threads, methods, models):
        table.title_style = "bold"
        console.print(table)
        console.print()
