# make run    set up .venv, serve a small demo model, stream a completion from it, keep serving
# make test   set up .venv, run what a change can have turned red since the last make test-all, and what users do first
# make test-all  every test there is but those of a cluster, and chaos; writes tests/night.json, from which `make test`
#             knows what has changed since
# make gpu1-test  engine, kernels, memory and a whole server on one GPU; make gpu-test  the links between GPUs, on a machine
#             with 2 or 4 of them. Both write tests/gpu_results.json
# make check  what CI runs: lint, types, imports, test
# make chaos  10 minutes of dying processes and failing cables under load; CHAOS_MINUTES=1 for less
# make abuse  what people who mean harm would send, each as a test under the chart's memory limits; make abuse-soak: all of it for
#             10 minutes beside honest streams; make abuse-crowds: thousands who do nothing; make abuse-pauses: each role stopped
# make dist   a wheel and a source distribution, in dist/
# make chart  write what follows from the chart's values: schema, table, manifests/
# make images, make images-cuda   build the chart's images, by docker or BUILD='buildah bud'; TAG=... names another version
# make cluster-test   prove the chart on a real cluster (KUBE_TOOL: a program that runs one)
# make cluster-dry    its part that needs no images: a real API server accepts what the chart renders; says so where none can run
# make observe  Prometheus with the rules, and the dashboards, for the servers of this machine
# make fleet  the control plane with 2,000 expert workers that compute nothing: times, CPU, Redis, series; 3 minutes
# make fleet-nodes  the chart on 500 fake nodes of a cluster (KUBE_TOOL): objects, Helm's release, pods, KEDA
# make demo-model   make the pocket model of examples/ again (a smoke run where there is no GPU)

PYTHON ?= python3
TORCH := torch==2.13.0
BIN := .venv/bin
STAMP := .venv/.installed
MODEL ?=
PORT ?=
RESULTS := .cache/results
CHAOS_MINUTES ?= 10
CHAOS_SEED ?= 1
CHAOS_OUT ?= .cache/chaos
CHAOS_ARGS ?=
ABUSE_OUT ?= .cache/abuse
ABUSE_ARGS ?=
OBSERVE_ARGS ?=
FLEET_ARGS ?=
KUBE_PLOTS ?= .cache/cluster
BUILD ?= docker build
TAG ?= $(shell sed -n 's/^appVersion: "\(.*\)"/\1/p' helm/expertmesh/Chart.yaml)
# torch for CPUs is not on PyPI. PIP_INDEX_URL leads to a mirror, DEBIAN_ARCHIVE to one of Debian's daily archives.
CPU_INDEX ?= https://download.pytorch.org/whl/cpu
BUILD_ARGS = $(if $(PIP_INDEX_URL),--build-arg PIP_INDEX_URL=$(PIP_INDEX_URL))
IMAGE = $(BUILD) -f helm/images/Dockerfile $(BUILD_ARGS)

.PHONY: env run test test-all gpu-test gpu1-test lint types imports check bench-cpu observe chaos leaks abuse abuse-soak abuse-crowds abuse-pauses fleet fleet-nodes demo-model dist chart manifests images images-cuda cluster-test cluster-dry \
  kube-tool constraints locks clean

env: $(STAMP)

# Python compiles what is imported, when it is: all of it at once would take a third of the time.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "$(PYTHON) is older than Python 3.11; name a newer one: make PYTHON=python3.12"; exit 1; }
	@test -x $(BIN)/pip || $(PYTHON) -m venv .venv || { rm -rf .venv; \
	  echo "$(PYTHON) cannot make virtual environments. On Debian and Ubuntu: apt install python3-venv"; exit 1; }
	$(BIN)/pip install --quiet --no-compile $(TORCH)
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev]'
	@touch $(STAMP)

run: env
	@$(BIN)/expertmesh demo $(if $(MODEL),--model '$(MODEL)') $(if $(PORT),--port $(PORT))

# $(1): lane and name of the run. Files run two at a time, then those alone that start more processes than there are
# cores; last, no test may have been skipped but those of tests/expected_skips.toml.
define tests
	rm -rf $(RESULTS)/$(1)
	$(BIN)/pytest -q -n 2 --dist loadfile --lane=$(1) --results=$(RESULTS)/$(1)/together.jsonl -m 'not alone' \
	  --ignore=tests/cluster --ignore=tests/abuse
	$(BIN)/pytest -q --lane=$(1) --results=$(RESULTS)/$(1)/alone.jsonl -m alone tests/flow
	PYTHONPATH=tests $(BIN)/python -m testkit.results $(2) $(RESULTS)/$(1)/*.jsonl
endef

test: env
	$(call tests,commit)

test-all: env chaos
	$(BIN)/pip install --quiet --no-compile -c constraints.txt -e '.[dev,night]'
	$(call tests,all,--record)

# Use the python of the environment at hand where there is no .venv: on such machines torch is usually there already.
# GPU_ARGS='-k memory': some of them; they write what ran into tests/gpu_results.json.
gpu-test gpu1-test: %-test:
	PYTHONPATH=$(CURDIR):$(CURDIR)/kernels:$(CURDIR)/tests:$(CURDIR)/examples/pocket-moe$(if $(PYTHONPATH),:$(PYTHONPATH)) TRITON_INTERPRET=0 \
	  $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON)) -m testkit.gpu.results --set $* $(GPU_ARGS)

lint: env
	$(BIN)/ruff check .
	$(BIN)/ruff format --check --quiet .

types: env
	$(BIN)/mypy

imports: env
	$(BIN)/lint-imports --config importlinter.toml

check: lint types imports test

bench-cpu: env
	$(BIN)/python -m perf.cpu.bench_cpu

# Needs `prometheus` on PATH (Debian's package); OBSERVE_ARGS='--port 9090': see --help.
observe: env
	$(BIN)/expertmesh observe $(OBSERVE_ARGS)

# Needs root for cuts and delays; without it, kills alone. CHAOS_ARGS='--kills 20 --most-gap 0.4': kills of replicas only.
chaos: env
	PYTHONPATH=tests:examples/pocket-moe $(BIN)/python -m chaos --minutes $(CHAOS_MINUTES) --seed $(CHAOS_SEED) \
	  --json $(CHAOS_OUT)/chaos.json --svg $(CHAOS_OUT)/chaos.svg $(CHAOS_ARGS)

# An hour. LEAKS_ARGS='--minutes 2': see --help.
leaks: env
	PYTHONPATH=tests:examples/pocket-moe $(BIN)/python -m chaos.leaks --json $(CHAOS_OUT)/leaks.json $(LEAKS_ARGS)

# As root the memory limits are cgroups, sockets included; without, RLIMIT_DATA. ABUSE_ARGS='-k heads': some of them.
abuse: env
	ABUSE_OUT=$(ABUSE_OUT) $(BIN)/pytest -q --durations=10 -p no:cacheprovider -m abuse tests/abuse $(ABUSE_ARGS)

# ABUSE_ARGS='--minutes 2': see --help.
abuse-soak abuse-crowds abuse-pauses: abuse-%: env
	PYTHONPATH=tests:examples/pocket-moe $(BIN)/python -m abuse.$* --json $(ABUSE_OUT)/$*.json $(ABUSE_ARGS)

# Alone on its machine: it plays 2,000 workers as well. FLEET_ARGS='--experts 500': see --help.
fleet: env
	OMP_NUM_THREADS=1 PYTHONPATH=.:tests $(BIN)/python -m perf.fleet.control_plane $(FLEET_ARGS)

# Before env, which may take minutes.
kube-tool:
	@test -x '$(KUBE_TOOL)' || { echo "KUBE_TOOL must name a program that runs a cluster: make KUBE_TOOL=path/to/it ..."; exit 1; }

fleet-nodes: kube-tool env
	KUBE_TOOL=$(KUBE_TOOL) PYTHONPATH=.:tests $(BIN)/python -m perf.fleet.nodes $(FLEET_ARGS)

demo-model: env
	examples/pocket-moe/rebuild.sh

dist: env
	rm -rf dist
	$(BIN)/python -m build --no-isolation

chart: env
	$(BIN)/python helm/generate.py
	$(BIN)/python helm/render.py

manifests: env
	$(BIN)/python helm/render.py

images:
	$(IMAGE) -t expertmesh-control:$(TAG) --target control .
	$(IMAGE) --build-arg PIP_EXTRA_INDEX_URL=$(CPU_INDEX) -t expertmesh-worker-cpu:$(TAG) --target worker-cpu .

images-cuda:
	$(IMAGE) $(if $(DEBIAN_ARCHIVE),--build-arg DEBIAN_ARCHIVE=$(DEBIAN_ARCHIVE)) -t expertmesh-worker-cuda:$(TAG) --target worker-cuda .

# Brings the cluster up, and down again unless it ran before. The timeline of test_scaling.py goes to KUBE_PLOTS.
# KUBE_FROM=REV also upgrades from that commit's chart and images.
cluster-test: kube-tool env
	KUBE_TOOL=$(KUBE_TOOL) KUBE_PLOTS=$(KUBE_PLOTS) $(BIN)/pytest -q -s --durations=0 tests/cluster

# A part of CI: where KUBE_TOOL names no program, it says so and is content; a cluster that does not start is a failure.
cluster-dry: env
	rm -rf $(RESULTS)/cluster-dry
	KUBE_OPTIONAL=1 KUBE_TOOL=$(KUBE_TOOL) $(BIN)/pytest -q -rs --results=$(RESULTS)/cluster-dry/all.jsonl \
	  tests/cluster/test_templates.py tests/cluster/test_lockstep_templates.py
	KUBE_TOOL=$(KUBE_TOOL) PYTHONPATH=tests $(BIN)/python -m testkit.results $(RESULTS)/cluster-dry/all.jsonl

# Exact versions of what the extras need now, without the local tag of a torch build.
constraints:
	rm -rf .cache/constraints && $(PYTHON) -m venv .cache/constraints
	.cache/constraints/bin/pip install --quiet $(TORCH)
	.cache/constraints/bin/pip install --quiet -e '.[dev,night]'
	.cache/constraints/bin/pip freeze --exclude-editable | sed -E 's/^(torch==[0-9.]+)\+.*/\1/' > constraints.txt
	rm -rf .cache/constraints

# Hashes of what goes into the images, for their Python, from constraints.txt.
locks:
	helm/images/lock.sh

clean:
	rm -rf .cache .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache build dist *.egg-info
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
