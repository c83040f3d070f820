#!/usr/bin/env bash
# Records the traces that scripts/method_tables.py reads: scripts/traces.sh FOLDER   (Qwen 0.5B and SmolLM2; about 4 GB)
set -euo pipefail
folder=${1:?folder to write to}
mkdir -p "$folder"
kvrecall=${KVRECALL:-.venv/bin/kvrecall}
python=${PYTHON:-.venv/bin/python}
log=src/kvrecall/data/harbour_log.md
code=$("$python" -c 'import argparse; print(argparse.__file__)')

"$python" scripts/turns.py "$log" > "$folder/turns.txt"
head -c 14000 "$code" > "$folder/code.txt"

# One long prompt, every prompt query kept: English, then Python.
"$kvrecall" trace "$folder/long.safetensors" "$log" "$code" --tokens 16k --steps 160 --observe 16384
# Twelve turns about one document: question and answer are given, not generated.
"$kvrecall" trace "$folder/turns.safetensors" "$log" --ending $'\n' --continue "$folder/turns.txt" \
  --layers 2,6,10,14,18,22
# Thousands of tokens after a short prompt of another kind.
"$kvrecall" trace "$folder/drift.safetensors" "$log" --tokens 4k --continue "$folder/code.txt" --layers 2,6,10,14,18,22
"$kvrecall" trace "$folder/smollm2.safetensors" "$log" --model smollm2-135m --tokens 6k --steps 64
