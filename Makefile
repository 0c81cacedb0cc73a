# Everything is set up in .venv and .cache, inside this folder. Two commands do all: `make demo`, `make test`.

PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && echo $$p && break; done)
BIN := .venv/bin
WORKERS ?= 2

export PIP_CACHE_DIR := $(CURDIR)/.cache/pip
export PIP_DISABLE_PIP_VERSION_CHECK := 1
export JAX_COMPILATION_CACHE_DIR := $(CURDIR)/.cache/jax
export JAX_PLATFORMS ?= cpu

.PHONY: demo test test-all test-gpu explore lint types contracts rules clean

demo: .venv/run
	$(BIN)/python -m scripts.demo

test: .venv/test
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

test-all: .venv/eval
	TEST_EFFORT=2 $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m "not gpu"

# On a machine with an accelerator, in an environment that has JAX for it (extra cuda12 or cuda13).
test-gpu:
	JAX_PLATFORMS= python3 -m pytest tests/gpu -m gpu

# Search small planner worlds deeper than the tests do.
explore: .venv/test
	$(BIN)/python -m planner.testing --states $(or $(STATES),1000000)

# Rules of contracts.md that no test cites; the list must be empty.
rules: .venv/test
	$(BIN)/python -m scripts.check_rules

lint: .venv/test
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: .venv/test
	$(BIN)/mypy

contracts: .venv/test
	$(BIN)/lint-imports

clean:
	rm -rf .venv .cache build *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis .import_linter_cache

# One stamp for each set of packages; a change of the pins installs again.
.venv/bin/python:
	@test -n "$(PYTHON)" || { echo "Python 3.11 or newer is needed; set PYTHON=/path/to/python3.x" >&2; exit 1; }
	$(PYTHON) -m venv .venv

.venv/run: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e .
	@touch $@

.venv/test: .venv/bin/python pyproject.toml constraints.txt
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test]"
	@touch $@ .venv/run

.venv/eval: .venv/test
	$(BIN)/python -m pip install --quiet -c constraints.txt -e ".[test,eval,ray]"
	@touch $@
