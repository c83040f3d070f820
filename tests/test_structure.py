"""The folder tree is the data path: who may import whom, how long files are, and that the map of the code is true."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kvrecall
from kvrecall.core import extras
from kvrecall.core.errors import MissingPackageError
from tests import import_graph, private_names

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "kvrecall"
FILES = sorted(PACKAGE.rglob("*.py"))
BENCHMARKS = sorted((ROOT / "benchmarks").rglob("*.py"))
_PARTS = "core", "parts", "cache", "select", "merge", "attend", "fetch", "trigger", "index", "static"
_ALL = *_PARTS, "methods", "layer", "step", "baselines", "models", "backends", "engine"
LAYERS: dict[str, tuple[str, ...]] = {
    "core": (),
    "parts": ("core",),
    "cache": ("core",),
    "select": ("core",),
    "merge": ("core",),
    "attend": ("core", "merge"),
    "fetch": ("core", "parts"),
    "trigger": ("core", "parts"),
    "index": ("core", "parts", "cache", "select", "attend"),
    "static": ("core", "parts", "cache", "select", "fetch", "index"),
    "methods": _PARTS,
    "layer": (*_PARTS, "methods"),
    "step": (*_PARTS, "methods"),
    "baselines": (*_PARTS, "methods"),
    "models": ("core",),
    "backends": (*_PARTS, "methods", "layer", "step", "models"),
    "engine": (*_PARTS, "methods", "layer", "step", "models", "backends"),
    "evaluate": _ALL,
    "cli": (*_ALL, "evaluate"),
}
"""The folders, and which of them each may import. What a folder imports stands above it."""
LATE = {("kvrecall.index.sphere.config", "kvrecall.index.sphere")}
"""Pairs of modules that import each other, one of them inside a function."""
CIRCULAR = ("kvrecall.index.sphere", "kvrecall.index.base", "kvrecall.index.step")
"""Modules that may import each other, inside functions or for types."""
THIRD_PARTY = {
    "_C", "_cuda_hasPrimaryContext", "_cuda_getCurrentRawStream", "_dynamo", "_buffers", "_call_impl", "_compiled_call_impl",
    "_torchdynamo_orig_callable", "_parameters", "_non_persistent_buffers_set", "_forward_pre_hooks", "_hf_hook",
    "_scaled_dot_product_flash_attention", "_scaled_dot_product_flash_attention_for_cpu", "_scaled_dot_product_cudnn_attention",
    "_attn_implementation", "_attn_implementation_internal", "_can_set_attn_implementation", "_device_mesh", "_global_mapping",
    "_cdata", "_ensure_registered", "_k_scale", "_v_scale",
    "_current_frames", "_getframe", "_replace", "_mamba_block_aligned_split",
    "_update_model_kwargs_for_generation", "_optimize_model_for_decode",
    "_mask_length",
}  # fmt: skip
"""Names of torch, transformers, vLLM and Python that have no public form."""
FREE = [*_PARTS, "layer", "step", "methods", "baselines"]
"""Folders that import without transformers and vLLM."""
SEAM = {"backends/__init__.py", "backends/base.py", "backends/interrupt.py", "backends/memory.py"}
"""What a backend without transformers shares with that one, which imports without it, too."""


def imports(path: Path) -> set[str]:
    """Folders and files at the top of the package that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = [a.name for a in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}: relative import"
            module = node.module or ""
            names = [f"kvrecall.{a.name}" for a in node.names] if module == "kvrecall" else [module]
        found |= {name.split(".")[1] for name in names if name.startswith("kvrecall.")}
    return found


def test_folders_import_those_below_them() -> None:
    below: set[str] = set()
    for folder, allowed in LAYERS.items():
        assert set(allowed) <= below, folder
        below.add(folder)
    folders = {path.name for path in PACKAGE.iterdir() if any(path.glob("*.py"))}
    assert folders | {"parts"} == set(LAYERS)
    public = {path.stem for path in PACKAGE.glob("*.py")} | set(kvrecall.__all__)
    for path in FILES:
        home = _home(path)
        if home in LAYERS:
            more = public if home in ("evaluate", "cli") else set()  # they may use what users do
            assert imports(path) <= {home, *LAYERS[home]} | more, path.relative_to(PACKAGE)


def test_modules_import_each_other_in_one_direction() -> None:
    loaded, _ = import_graph.graphs(PACKAGE)
    assert import_graph.cycle(loaded) == []


def test_no_import_waits_in_a_function_because_it_would_be_a_cycle() -> None:
    """Imports inside functions are for what is slow to import or not always installed."""
    loaded, called = import_graph.graphs(PACKAGE)
    folders = import_graph.by_folder(loaded)
    assert import_graph.cycle({name: folders[name] | more for name, more in import_graph.by_folder(called).items()}) == []
    late = {(name, target) for name, targets in called.items() for target in targets}
    assert {pair for pair in late if import_graph.reaches(loaded, pair[1], pair[0])} == LATE


def test_no_circles_but_those_of_the_sphere_index_and_of_an_index_with_its_step() -> None:
    """Not even through functions, or for types."""
    loaded, called = import_graph.graphs(PACKAGE, types=True)
    every = {name: targets | called[name] for name, targets in loaded.items()}
    circular = {name for name, targets in every.items() if any(import_graph.reaches(every, target, name) for target in targets)}
    assert not [name for name in circular if not name.startswith(CIRCULAR)]


def test_private_names_stay_in_their_folder() -> None:
    """A subclass may use what its own folder names alike."""
    folders: dict[str, list[Path]] = {}
    for path in FILES:
        folders.setdefault(_home(path), []).append(path)
    for files in folders.values():
        own = private_names.defined(files) | THIRD_PARTY
        for path in files:
            assert {name for name, _ in private_names.used(path)} <= own, path.relative_to(PACKAGE)


def test_layers_and_methods_need_no_framework() -> None:
    files = [path.relative_to(PACKAGE) for path in FILES if _home(path) in FREE or str(path.relative_to(PACKAGE)) in SEAM]
    assert set(map(str, files)) >= SEAM
    modules = [".".join(("kvrecall", *path.with_suffix("").parts)) for path in files]
    program = f"""
import importlib, sys
sys.modules["transformers"] = sys.modules["vllm"] = None
for name in {modules!r}:
    importlib.import_module(name.removesuffix(".__init__"))
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_methods_are_made_without_transformers() -> None:
    program = """
import sys
sys.modules["transformers"] = None
import kvrecall
assert kvrecall.ParisKV(top_k=100).top_k == 100
assert kvrecall.methods.get("quest", top_k=8).name == "quest"
assert str(kvrecall.parts.get("index", "pages")) == "pages"
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_without_transformers_its_extra_is_named() -> None:
    """By each use of it, in one process, which takes a second to start."""
    uses = ["kvrecall.RetrievalCache", "kvrecall.attach", "kvrecall.ask", "kvrecall.engine", "models.load('x')",
            "models.load_config('x')",
            "importlib.import_module('kvrecall.backends.transformers.cache')",
            "importlib.import_module('kvrecall.evaluate.trace')"]  # fmt: skip
    program = f"""
import importlib, sys
sys.modules["transformers"] = None
import kvrecall
from kvrecall import models
for use in {uses!r}:
    try:
        eval(use)
    except kvrecall.errors.MissingPackageError as error:
        print(use, error)
"""
    run = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    told = 'transformers: expected it to be installed, got none. Run `pip install ".[transformers]"` in a clone of kvrecall.'
    assert run.stdout.splitlines() == [f"{use} {told}" for use in uses]


@pytest.mark.parametrize("version, works", [
    ("4.57.6", False), ("5.16.0", False), ("5.16.1", True), ("5.17.0.dev0", True),
    ("5.23.9", True), ("5.24.9", True), ("5.25.0", False), ("6.0.0", False),
])  # fmt: skip
def test_other_releases_of_transformers_are_refused(version: str, works: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras.metadata, "version", lambda _: version)
    if works:
        extras.require_transformers()
        return
    expected = f"transformers: expected 5.16.1 or newer, but before 5.25, got {version}. Run"
    with pytest.raises(MissingPackageError, match=re.escape(expected)):
        extras.require_transformers()


def test_releases_of_transformers_are_those_of_its_extra() -> None:
    oldest, end = (".".join(map(str, version)) for version in extras.TRANSFORMERS)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    asked = [name for name in project["optional-dependencies"]["transformers"] if name.startswith("transformers")]
    assert asked == [f"transformers>={oldest},<{end}"]
    assert not [name for name in project["dependencies"] if "transformers" in name]


def test_the_wheel_needs_nothing_that_stays_in_the_repository() -> None:
    for path in FILES:
        tree = ast.walk(ast.parse(path.read_text()))
        named = {(node.module or "") if isinstance(node, ast.ImportFrom) else alias.name
                 for node in tree if isinstance(node, ast.Import | ast.ImportFrom) for alias in node.names}  # fmt: skip
        found = {name.split(".")[0] for name in named} & {"benchmarks", "notebook", "scripts", "tests"}
        assert not found, path.relative_to(PACKAGE)


def _home(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def test_references_import_no_kernel() -> None:
    for path in PACKAGE.rglob("reference.py"):
        text = path.read_text()
        assert not {"cpu", "kernels"} & {
            part for line in text.splitlines() if "import" in line for part in line.replace(".", " ").split()
        }
        assert "numba" not in text and "triton" not in text


def test_files_say_what_they_are() -> None:
    for path in (*FILES, *BENCHMARKS):
        assert ast.get_docstring(ast.parse(path.read_text())), path.relative_to(ROOT)


def test_tests_lie_in_the_folder_of_what_they_test() -> None:
    """Folders of tests are folders of the package, of the repository, or kinds of tests that go through many of them."""
    folders = {path.parent.relative_to(ROOT / "tests").parts[0] for path in (ROOT / "tests").glob("*/**/test_*.py")}
    package = {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    assert folders <= package | {"benchmarks", "docs", "examples", "gpu", "interpreted", "stateful", "zoo"}
    alone = {path.stem.removeprefix("test_") for path in (ROOT / "tests").glob("test_*.py")}
    assert alone <= {path.stem for path in PACKAGE.glob("*.py")} | {"invariants", "packaging", "refused_memory", "structure"}


MAKERS = {"zeros", "ones", "empty", "full", "rand", "randn", "tensor", "linspace", "eye"}
"""Functions of torch that make a tensor whose dtype and device depend on defaults that a user may have set."""
DEVICE_ONLY = {"arange", "as_tensor", "randint", "randperm"}
"""Those whose dtype follows from their arguments here."""


def test_tensors_say_their_dtype_and_device() -> None:
    """`torch.set_default_dtype` and `torch.set_default_device` change nothing."""
    for path in FILES:
        for call in ast.walk(ast.parse(path.read_text())):
            if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Attribute):
                continue
            if ast.unparse(call.func.value) != "torch" or call.func.attr not in MAKERS | DEVICE_ONLY:
                continue
            given = {keyword.arg for keyword in call.keywords}
            needed = {"device"} if call.func.attr in DEVICE_ONLY else {"dtype", "device"}
            assert None in given or needed <= given, f"{path}, line {call.lineno}: {ast.unparse(call)}"


def test_public_names_are_few_and_importing_changes_nothing_global() -> None:
    program = """
import sys
import transformers.modeling_utils as m, transformers.masking_utils as k
before = set(m.AttentionInterface._global_mapping), set(k.AttentionMaskInterface._global_mapping)
import kvrecall
assert len(kvrecall.__all__) <= 12
for name in kvrecall.__all__:
    getattr(kvrecall, name)
assert (set(m.AttentionInterface._global_mapping), set(k.AttentionMaskInterface._global_mapping)) == before
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_completion_lists_the_public_names_without_importing_them() -> None:
    program = """
import sys
import kvrecall
shown = [name for name in dir(kvrecall) if not name.startswith("__")]
assert shown == sorted({*kvrecall.__all__, "engine", "errors", "methods", "models", "parts"} - {"__version__"}), shown
assert "__version__" in dir(kvrecall) and "torch" not in sys.modules
assert all(getattr(kvrecall, name) is not None for name in dir(kvrecall) if name != "__cached__")
"""
    subprocess.run([sys.executable, "-c", program], check=True, cwd=ROOT)


def test_the_package_runs_as_a_program() -> None:
    run = subprocess.run([sys.executable, "-m", "kvrecall", "--version"], capture_output=True, text=True, check=True)
    assert run.stdout.startswith("kvrecall ")
    run = subprocess.run([sys.executable, "-m", "kvrecall", "models", "--help"], capture_output=True, text=True, check=True)
    assert ".gguf" in run.stdout and "OWNER/NAME" in run.stdout


def test_composition_page_is_what_the_code_says() -> None:
    run = subprocess.run(
        [sys.executable, ROOT / "scripts" / "composition_table.py"], capture_output=True, text=True, check=True
    )
    assert run.stdout.strip() in (ROOT / "docs" / "methods" / "composition.md").read_text()
