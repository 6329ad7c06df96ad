#!/usr/bin/env bash
# The pocket model from nothing: text, tokenizer, training, speculators, records, card. An hour on one Hopper GPU.
# With --smoke, or where there is no GPU: text, tokenizer and 20 steps of a tiny model on the CPU.
set -euo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python} here=examples/pocket-moe work=build/pocket-moe

step() { echo "== $1"; "$python" "$here/$1.py" "${@:2}"; }

step data --work "$work"
if [ "${1:-}" = --smoke ] || ! command -v nvidia-smi > /dev/null; then
  rm -rf "$work/runs/smoke"
  step train --work "$work" --run smoke --smoke
  exit
fi

# Both runs see the same tokens. With less dropout the experts learn the dictionary by heart and lose on held-out words.
recipe=(--work "$work" --steps 16000 --warmup 200 --lr 3e-3 --dropout 0.2 --weight-decay 0.2 --weights dictionary=2)
fast=(--attention varlen --compile --graph)
step train --run moe --product parallel_linear "${recipe[@]}" "${fast[@]}"
step train --run dense --kind dense "${recipe[@]}" "${fast[@]}"
rm -rf "$here/model" "$here/speculators"
cp -r "$work/runs/moe/model" "$here/model"
step speculate --work "$work" "${fast[@]}"
step evaluate --work "$work"
if "$python" -c 'import vllm' 2> /dev/null; then step agree --work "$work"; fi
step trace --work "$work"
step card --work "$work" --collect
