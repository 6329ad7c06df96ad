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
  local name=$1 common=(--quiet --universal --python-version 3.11 --no-annotate --no-header); shift
  local files=$work/pylock.${name%.lock}.toml
  $work/bin/uv pip compile "${common[@]}" --generate-hashes --custom-compile-command "make locks" -o "$work/$name" "$@"
  $work/bin/uv pip compile "${common[@]}" --format pylock.toml -o "$files" "$@"
  only_usable "$name" "$files"
}
only_usable() { # NAME FILES: of the hashes in $work/NAME those of wheels that the images can take, by the names in FILES;
                # a package without one for ARM (hdrhistogram) is left out there
  $work/bin/python - "$work/$1" "$2" <<'PY'
import re, sys, tomllib
lock, files = sys.argv[1:]
named = re.compile(r"/([^/]+)\.whl$")
fits = re.compile(r"-(py[23.]*3|cp311-cp311|cp3\d*-abi3)(-none|)-(any|.*manylinux.*_(x86_64|aarch64))$")
wheels = [wheel for package in tomllib.load(open(files, "rb"))["packages"] for wheel in package.get("wheels", ())]
usable = {
    wheel["hashes"]["sha256"]: name[1] for wheel in wheels
    if (name := named.search(wheel.get("url", ""))) and fits.search(name[1])
}
found = []
for entry in re.split(r"\n(?=\S)", open(lock).read().strip()):
    head, *hashes = entry.split(" \\\n    --hash=sha256:")
    mine = [each for each in hashes if each in usable]
    if mine and ";" not in head and all(usable[each].endswith("x86_64") for each in mine):
        head += " ; platform_machine == 'x86_64'"
    found.append([head, *(mine or hashes)])
open(lock, "w").write("".join(" \\\n    --hash=sha256:".join(entry) + "\n" for entry in found))
PY
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
lock control.lock pyproject.toml --extra kubernetes --extra load --extra tracing -c constraints.txt
echo hatchling | lock build.lock -
grep -v -E '^(torch|triton)==' constraints.txt > $work/cpu.txt
version=$(sed -n 's/^torch==//p' constraints.txt)
echo "torch==$version+cpu" >> $work/cpu.txt
lock worker-cpu.lock pyproject.toml --extra worker-cpu -c $work/cpu.txt --find-links "$torch_cpu"
lock worker-cuda.lock pyproject.toml --extra worker -c constraints.txt
for name in control build; do cp $work/$name.lock helm/images/; done
for name in worker-cpu worker-cuda; do only_more $name.lock > helm/images/$name.lock; done
wc -l helm/images/*.lock
