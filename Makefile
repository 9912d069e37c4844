# `make demo` runs the main job, `make test` the tests; both set everything up first and are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= 2
STAMP := $(VENV)/.installed

# More options of pytest: PYTEST_FLAGS=--last-failed
PYTEST_FLAGS ?=
PYTEST := $(BIN)/python -m pytest $(PYTEST_FLAGS)
# `make test-gpu PART=2` runs one of them; without PART all run, one after another.
PARTS := 1 2 3
FILES_1 := tests/generation tests/kernels
FILES_2 := tests --ignore tests/generation --ignore tests/kernels --ignore tests/parallel/test_gpus.py
FILES_3 := tests/parallel/test_gpus.py
GPU_TEST_WORKERS ?= 8

MKDOCS := NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs

.PHONY: setup demo docs check-docs test test-core test-mcore test-slow test-nodes test-nodes-short fuzz faults test-gpu test-gpu-part test-matrix lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "dlm-bridge needs Python 3.11 or later: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[megatron,demo,docs,dev]'
	@touch $@

demo: setup
	$(BIN)/python scripts/demo.py

test: setup
	$(PYTEST) --numprocesses $(TEST_WORKERS) --dist loadfile -m "not slow and not nodes"

# The fast tests that need no extension.
test-core: setup
	$(PYTEST) --numprocesses $(TEST_WORKERS) --dist loadfile --core -m "not slow and not nodes"

# The Megatron engine's tests on megatron-core 0.19, which needs Python 3.12, in an environment of their own (5 GB, because
# PyPI's torch brings CUDA libraries).
MCORE_PYTHON ?= python3.12
MCORE_VENV := build/mcore
MCORE_TESTS ?= tests/interop tests/parallel
test-mcore: $(MCORE_VENV)/.installed
	DLM_BRIDGE_PLATFORM=cpu $(MCORE_VENV)/bin/python -m pytest $(PYTEST_FLAGS) --numprocesses $(TEST_WORKERS) --dist loadfile \
		-m "not slow and not nodes" $(MCORE_TESTS)

$(MCORE_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(MCORE_VENV)/bin/python || $(MCORE_PYTHON) -m venv $(MCORE_VENV)
	$(MCORE_VENV)/bin/python -m pip install --quiet --constraint constraints.txt --editable '.[megatron,demo,dev]' 'megatron-core==0.19.*'
	@touch $@

test-slow: setup
	$(PYTEST) --numprocesses $(TEST_WORKERS) --dist loadfile -m slow

# Two nodes of this machine, which needs root, iproute2, slurm-wlm and munge: what is absent is skipped with a line. The
# rounds of accidents that were stopped go on from NODES_STATE.
NODES_ROUNDS ?= 30
NODES_STATE ?= build/nodes.json
test-nodes: setup
	mkdir -p build
	$(PYTEST) --numprocesses $(TEST_WORKERS) --dist loadfile -m nodes -rs tests/nodes
	nice $(BIN)/python -m tests.nodes --rounds $(NODES_ROUNDS) --state $(NODES_STATE)

# At most 5 minutes on two cores.
test-nodes-short: setup
	$(PYTEST) --numprocesses $(TEST_WORKERS) --dist loadfile -m "nodes and short" -rs tests/nodes

# Damaged inputs under every command; a run that was stopped goes on from FUZZ_STATE.
FUZZ_CASES ?= 5000
FUZZ_STATE ?= build/fuzz.json
fuzz: setup
	mkdir -p build
	nice $(BIN)/python -m tests.fuzz --cases $(FUZZ_CASES) --state $(FUZZ_STATE)

# Runs of eight processes under random faults; a run that was stopped goes on from FAULTS_STATE.
FAULTS_ROUNDS ?= 100
FAULTS_STATE ?= build/faults.json
faults: setup
	mkdir -p build
	nice $(BIN)/python -m tests.faults --rounds $(FAULTS_ROUNDS) --state $(FAULTS_STATE)

# In parts that take less than 9 minutes each; each writes its row of docs/gpu_tests.md.
test-gpu: setup
	for part in $(or $(PART),$(PARTS)); do $(MAKE) --no-print-directory test-gpu-part PART=$$part || exit 1; done

test-gpu-part:
	$(PYTEST) --numprocesses $(GPU_TEST_WORKERS) --dist load -m "gpu or gpu2" --gpu-report docs/gpu_tests.md $(FILES_$(PART))

# One cell a call, in an environment of its own: make test-matrix CELL=py3.12-core0.19-torch2.13-transformers5.24
test-matrix:
	$(PYTHON) scripts/test_matrix.py $(CELL)

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports --no-cache
	$(MKDOCS) build --strict

docs: setup
	$(MKDOCS) build --strict
	@echo "the documentation lies in build/site/index.html"

# Every command block of the README and the documentation; after `make demo`.
check-docs: setup
	$(BIN)/python scripts/check_docs.py

clean:
	rm -rf $(VENV) demo-output build *.egg-info .pytest_cache .mypy_cache .ruff_cache
