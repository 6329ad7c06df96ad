#!/usr/bin/env bash
# The pocket model from nothing: text, tokenizer, training, speculators, records, card. About 25 minutes on one Hopper
# GPU and two cores. Started again after a stop, trainings go on from their last checkpoint.
# With --smoke, or where there is no GPU: text, tokenizer and 20 steps of a tiny model on the CPU; some 5 minutes.
# --work DIR: another working folder than build/pocket-moe. --sources FILE: another list of packages than sources.toml.
# The model, its speculators, records and card are made in WORK/made and take the place of the old ones at the end.
# Exits with 3 at the end if a claim of evaluate.py or agree.py does not hold.
set -euo pipefail
smoke='' work=build/pocket-moe sources=()
while [ $# -gt 0 ]; do
  case $1,${2:+value} in
    --smoke,*) smoke=1 ;;
    --work,value) work=$(realpath -m "$2") && shift ;;
    --sources,value) sources=(--sources "$(realpath -m "$2")") && shift ;;
    *)
      echo "usage: $0 [--smoke] [--work DIR] [--sources FILE]; there is no $1, or it lacks its value" >&2
      exit 2
      ;;
  esac
  shift
done
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python} here=examples/pocket-moe

step() { echo "== $1"; "$python" "$here/$1.py" "${@:2}"; }

train() {
  local resume=()
  if [ -f "$work/runs/$1/checkpoint.pt" ]; then resume=(--resume); fi
  step train --work "$work" --run "$1" "${@:2}" "${resume[@]}"
}

# The records say what fails; the card is made of them all the same.
failed=()
claim() {
  local status=0
  step "$@" || status=$?
  if [ "$status" = 3 ]; then
    failed+=("$1.py")
  elif [ "$status" != 0 ]; then
    exit "$status"
  fi
}

step data --work "$work" "${sources[@]}"
if [ -n "$smoke" ] || ! command -v nvidia-smi > /dev/null; then
  rm -rf "$work/runs/smoke"
  train smoke --smoke
  exit
fi

# Both runs see the same tokens, each with the dropout and weight decay that suit it best: tried.json has the others.
# With less dropout the experts learn the dictionary by heart and lose on held-out words.
recipe=(--steps 17000 --warmup 200 --lr 3e-3 --lr-floor 0.02 --decay 0.5 --weights dictionary=2)
recipe+=(--eval-every 1500 --log-every 50)
fast=(--attention varlen --compile --graph)
train moe --product parallel_linear --dropout 0.2 --weight-decay 0.2 "${recipe[@]}" "${fast[@]}"
train dense --kind dense --dropout 0.1 --weight-decay 0.1 "${recipe[@]}" "${fast[@]}"

# Everything that is measured on the model is made beside what is there. The same model keeps its records.
made=$work/made
rm -rf "$made" && mkdir -p "$made"
if cmp -s "$work/runs/moe/model/model.safetensors" "$here/model/model.safetensors"; then
  for kept in speculators records; do if [ -d "$here/$kept" ]; then cp -r "$here/$kept" "$made"; fi; done
fi
cp -r "$work/runs/moe/model" "$made/model"
if [ -f "$here/tried.json" ]; then cp "$here/tried.json" "$made"; fi
measured=(--work "$work" --model "$made/model" --out "$made/records")
step speculate "${measured[@]}" --speculators "$made/speculators" "${fast[@]}"
claim evaluate "${measured[@]}"
vllm=1
if "$python" -c 'import vllm' 2> /dev/null; then claim agree "${measured[@]}"; else vllm=''; fi
step trace "${measured[@]}"
step card --work "$work" --root "$made" --collect "${sources[@]}"
for part in model speculators records plots manifest.json MODEL_CARD.md; do
  rm -rf "${here:?}/$part"
  mv "$made/$part" "$here/$part"
done
rm -rf "$made"

if [ -z "$vllm" ]; then
  echo "vLLM is not installed: agreement with it was not measured" >&2
  if [ -f "$here/records/vllm.json" ]; then echo "the card has that of an earlier run, of the same weights" >&2; fi
fi
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; see what they printed above" >&2
  exit 3
fi
