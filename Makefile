# `make demo` runs the main job, `make test` the tests; both set everything up first and are quick the second time.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
TEST_WORKERS ?= 2
STAMP := $(VENV)/.installed

.PHONY: setup demo test lint clean

setup: $(STAMP)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' \
		|| { echo "dlm-bridge needs Python 3.11 or later: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[megatron,dev]'
	@touch $@

demo: setup
	$(BIN)/python scripts/demo.py

test: setup
	$(BIN)/python -m pytest --numprocesses $(TEST_WORKERS) --dist loadfile

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

clean:
	rm -rf $(VENV) demo-output build *.egg-info .pytest_cache .mypy_cache .ruff_cache
