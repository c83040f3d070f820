#!/usr/bin/env bash
# Runs scripts/results.py on a machine with a GPU: scripts/results.sh FOLDER PACKED.jsonl.gz [options of `results.py run`]
#
# KVRECALL_MODELS names the folder of the models' files; a GGUF file there is dequantised once, to bfloat16, beside it.
# GROW_GIB=80 first writes to that much memory, for virtual machines that get theirs as it is used: what is free is asked for later.
# MODEL: another than qwen2.5-coder-1.5b. MPS=1 lets the processes' kernels run at the same time, where the driver's server for that can be started.
set -euo pipefail
folder=${1:?folder for the runs} packed=${2:?file for all samples}
shift 2
cd "$(dirname "$0")/.."
python=${PYTHON:-python3} model=${MODEL:-qwen2.5-coder-1.5b}
export PYTHONPATH="src:.${PYTHONPATH:+:$PYTHONPATH}" TOKENIZERS_PARALLELISM=false PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True
mkdir -p "$folder"

[ -z "${GROW_GIB:-}" ] || "$python" -c "import sys; len(b'1' * (int(sys.argv[1]) << 30))" "$GROW_GIB" &
grown=$!
# CTkvr reranks on the CPU: compiled once here, and not by every process.
"$python" -m benchmarks.cpu_layer --shapes smollm2 --tokens 2048 --dtypes bfloat16 --methods ctkvr --seconds 0.1 --out "$folder/warm.csv" > /dev/null 2>&1 &
warm=$!
echo "preparing the model"
time "$python" -c 'from kvrecall.models import load; import sys; load(sys.argv[1], "bfloat16", "cpu")' "$model"
wait "$grown" "$warm" 2> /dev/null || true

if [ "${MPS:-0}" = 1 ] && command -v nvidia-cuda-mps-control > /dev/null; then
  export CUDA_MPS_PIPE_DIRECTORY="$folder/mps" CUDA_MPS_LOG_DIRECTORY="$folder/mps"
  mkdir -p "$folder/mps"
  nvidia-cuda-mps-control -d
  trap 'echo quit | nvidia-cuda-mps-control || true' EXIT
  if ! timeout 60 "$python" -c 'import torch; torch.zeros(1, device="cuda")'; then
    echo "no MPS here; going on without it"
    echo quit | nvidia-cuda-mps-control || true
    trap - EXIT
    unset CUDA_MPS_PIPE_DIRECTORY CUDA_MPS_LOG_DIRECTORY
  fi
fi

"$python" scripts/results.py run "$folder" --model "$model" --pack "$packed" "$@"
grep -h FAILED "$folder"/logs/*.log | sort | uniq -c | sort -rn | head -40 || true
