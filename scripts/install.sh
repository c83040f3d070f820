#!/usr/bin/env bash
# Creates the virtual environment and installs kvrecall with its development tools, editable.
#
#   PYTHON          interpreter to build on            (python3; 3.11 or newer)
#   VENV            folder of the environment          (.venv)
#   TORCH_CPU_INDEX where CPU builds of torch are kept (PyTorch's own; asked only if pip's defaults have none)
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON="${PYTHON:-python3}"
VENV="${VENV:-.venv}"
TORCH_CPU_VERSION="2.13.0"
TORCH_GPU_SPEC="torch>=2.11"
TORCH_CPU_INDEX="${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}"

die() {
  echo "install: $*" >&2
  exit 1
}

has_gpu() {
  command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L 2>/dev/null | grep -q GPU
}

create_venv() {
  [[ -x "$VENV/bin/python" ]] && return
  command -v "$PYTHON" >/dev/null 2>&1 || die "'$PYTHON' not found; give a Python 3.11 or newer: make PYTHON=/path/to/python3.12"
  "$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "needs Python 3.11 or newer, '$PYTHON' is $("$PYTHON" -V 2>&1); choose another: make PYTHON=/path/to/python3.12"
  echo "install: creating $VENV with $("$PYTHON" -V 2>&1)"
  "$PYTHON" -m venv "$VENV" || die "could not create $VENV (on Debian and Ubuntu: apt-get install python3-venv)"
}

pip_install() {
  "$VENV/bin/python" -m pip install -qq --disable-pip-version-check "$@"
}

# A CPU build is ten times smaller than the CUDA build that pip's default index serves on Linux, so it is asked for by its
# local version label first: where the defaults do not know that label, nothing is downloaded before the next try.
install_torch() {
  if "$VENV/bin/python" - <<'PY' 2>/dev/null; then
import sys
from importlib.metadata import version

sys.exit(tuple(map(int, version("torch").split("+")[0].split(".")[:2])) < (2, 11))
PY
    return
  fi
  if has_gpu; then
    echo "install: torch with CUDA"
    pip_install "$TORCH_GPU_SPEC"
    return
  fi
  echo "install: torch $TORCH_CPU_VERSION for CPU (no GPU visible)"
  if [[ "$(uname -s)" == Linux ]]; then
    pip_install "torch==$TORCH_CPU_VERSION+cpu" 2>/dev/null && return
    pip_install --retries 0 --timeout 20 --extra-index-url "$TORCH_CPU_INDEX" "torch==$TORCH_CPU_VERSION+cpu" 2>/dev/null && return
  fi
  pip_install "torch==$TORCH_CPU_VERSION"
}

create_venv
install_torch
echo "install: kvrecall and its development tools"
pip_install -e ".[dev]"
