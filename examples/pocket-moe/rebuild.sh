#!/usr/bin/env bash
# The pocket model from nothing: text, tokenizer, training, speculators, records, card. About 25 minutes on one Hopper
# GPU and two cores. Started again after a stop, trainings go on from their last checkpoint.
# With --smoke, or where there is no GPU: text, tokenizer and 20 steps of a tiny model on the CPU; some 5 minutes.
# --work DIR: another working folder than build/pocket-moe. --sources FILE: another list of packages than sources.toml.
# Exits with 1 at the end if a claim of evaluate.py or agree.py does not hold.
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
  if [ "$status" = 1 ]; then
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
if ! diff -rq "$work/runs/moe/model" "$here/model" > /dev/null 2>&1; then
  rm -rf "$here/model" "$here/speculators" "$here/records" # of another model
  cp -r "$work/runs/moe/model" "$here/model"
fi
step speculate --work "$work" "${fast[@]}"
claim evaluate --work "$work"
if "$python" -c 'import vllm' 2> /dev/null; then claim agree --work "$work"; fi
step trace --work "$work"
step card --work "$work" --collect
if [ ${#failed[@]} -gt 0 ]; then
  echo "failed: ${failed[*]}; see what they printed above" >&2
  exit 1
fi
