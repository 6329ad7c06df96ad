#!/usr/bin/env bash
# Writes the lock files of the images: every package of constraints.txt that a target needs, with the hashes of all its
# files for the images' Python. torch for CPUs is not on PyPI; TORCH_CPU is a folder with its wheels, or their index.
set -euo pipefail
cd "$(dirname "$0")/../.."
work=.cache/locks
torch_cpu=${TORCH_CPU:-$( [ -d /opt/wheels ] && echo /opt/wheels || echo https://download.pytorch.org/whl/cpu/torch/ )}
mkdir -p $work
[ -x $work/bin/uv ] || { python3 -m venv $work && $work/bin/pip install --quiet uv; }

lock() { # NAME ARGUMENTS...: what they say, for CPython 3.11 on x86-64 and ARM
  local name=$1; shift
  $work/bin/uv pip compile --quiet --universal --python-version 3.11 --generate-hashes --no-annotate --no-header \
    --custom-compile-command "make locks" -o "$work/$name" "$@"
}
only_more() { # NAME: the packages of $work/NAME that control.lock lacks
  $work/bin/python - "$work/$1" "$work/control.lock" <<'PY'
import re, sys
def entries(file):
    return {re.match(r"[A-Za-z0-9_.-]+", text)[0].lower(): text for text in re.split(r"\n(?=\S)", open(file).read().strip())}
mine, control = (entries(file) for file in sys.argv[1:])
for name in mine.keys() & control.keys():
    version = lambda text: text.split()[0]
    assert version(mine[name]) == version(control[name]), f"{name}: the worker needs another version than control"
print("\n".join(text for name, text in sorted(mine.items()) if name not in control))
PY
}
rm -f $work/*.lock
lock control.lock pyproject.toml --extra loadgen -c constraints.txt
echo hatchling | lock build.lock -
grep -v -E '^(torch|triton)==' constraints.txt > $work/cpu.txt
version=$(sed -n 's/^torch==//p' constraints.txt)
echo "torch==$version+cpu" >> $work/cpu.txt
lock worker-cpu.lock pyproject.toml --extra worker-cpu -c $work/cpu.txt --find-links "$torch_cpu"
lock worker-cuda.lock pyproject.toml --extra worker -c constraints.txt
for name in control build; do cp $work/$name.lock helm/images/; done
for name in worker-cpu worker-cuda; do only_more $name.lock > helm/images/$name.lock; done
wc -l helm/images/*.lock
