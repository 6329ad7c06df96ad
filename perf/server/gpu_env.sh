# Source it in the root of the repository, on a machine with GPUs and torch where nothing can be installed: the wheels in
# .whl (those of constraints.txt that the machine lacks) go to /tmp/site, the packages of this tree are found in place.
python3 -m pip install -q --no-index --no-deps --no-compile --no-cache-dir --upgrade --target /tmp/site .whl/*.whl
mkdir -p /tmp/site/expertmesh-0.1.0.dist-info
printf 'Metadata-Version: 2.1\nName: expertmesh\nVersion: 0.1.0\n' >/tmp/site/expertmesh-0.1.0.dist-info/METADATA
export PYTHONPATH="$PWD:$PWD/kernels:$PWD/tests:/tmp/site" PYTHONUNBUFFERED=1
